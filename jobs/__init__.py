"""Ready jobs: a TOML each, their models and data beside them."""
