"""Bridges between jrl and what is not JAX: torch, simulators in other processes, robots."""

if __name__ == "bridges":
    raise ImportError(
        "import `jrl.bridges`: a second copy under another name breaks class identity"
    )
