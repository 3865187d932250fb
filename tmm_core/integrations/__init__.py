"""Ways into other libraries. Each module is imported by its user, never by ``import tmm_core``."""
