"""Which processes a worker of a project starts."""

from __future__ import annotations

from tests.celery.project import Project

SPECS = """
from outbox.contrib.django.workers import child_specs
for roles in [(), ("broker",), ("check",), ("check", "broker"), ("consumer",)]:
    try:
        print(*roles, "->", *(f"{spec.name}({','.join(spec.argv[3:])})" for spec in child_specs(roles)))
    except Exception as error:
        print(*roles, "->", type(error).__name__)
"""


def test_roles_choose_the_processes(shop: Project) -> None:
    assert shop.python(SPECS).splitlines() == [
        "-> broker(broker,check) consumer-1(consumer)",
        "broker -> broker(broker)",
        "check -> check(check)",
        "check broker -> broker(broker,check)",
        "consumer -> consumer-1(consumer)",
    ]


def test_without_subscribers_there_is_no_consumer(shop: Project) -> None:
    """It would end, and be started again, for ever. Who asks for one is told."""
    (shop.folder / "shop" / "subscribers.py").unlink()
    shop.write("shop/settings.py", "del OUTBOX['CELERY_APP']\n")
    (shop.folder / "shop" / "tasks.py").write_text("")
    (shop.folder / "shop" / "services.py").write_text("")
    lines = shop.python(SPECS).splitlines()
    assert (lines[0], lines[-1]) == ("-> broker(broker,check)", "consumer -> ConfigurationError")


def test_migrating_fresh_databases_warns_of_nothing(shop: Project, new_database: object) -> None:
    assert callable(new_database)
    shop.database_url, shop.outbox_url = new_database(), new_database()
    said = shop.shell("python manage.py migrate -v0\npython manage.py migrate -v0 --database=broker")
    assert said == ""
