"""Forty message handlers of a shop: twenty with a fault that only a crash or another order shows, twenty without.

They were written for the public API, before their author had read anything about the crash tests.
"""
