"""The pages."""

from __future__ import annotations

from django.contrib.auth.views import LoginView
from django.urls import path

from sample_project.storefront import views

app_name = "storefront"
urlpatterns = [
    path("", views.shop, name="shop"),
    path("cart/", views.cart_page, name="cart"),
    path("cart/add/", views.add_to_cart, name="add"),
    path("cart/remove/", views.remove_from_cart, name="remove"),
    path("orders/", views.orders_page, name="orders"),
    path("orders/new/", views.check_out_cart, name="check_out"),
    path("orders/<int:order_id>/", views.order_page, name="order"),
    path("orders/<int:order_id>/progress/", views.order_progress, name="progress"),
    path("orders/<int:order_id>/pay/", views.pay_order, name="pay"),
    path("income/", views.income_page, name="income"),
    path("report/", views.report_page, name="report"),
    path("login/", LoginView.as_view(template_name="storefront/login.html", next_page="outbox:overview"), name="login"),
]
