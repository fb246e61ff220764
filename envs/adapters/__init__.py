"""Foreign environments as `Env` or `HostEnv`."""
