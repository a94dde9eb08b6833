"""Settings of all tests: what a slow or busy machine does to a property test's speed says nothing about the property."""

from hypothesis import HealthCheck, settings

settings.register_profile("cflpriv", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("cflpriv")
