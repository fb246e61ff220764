"""Agents: one file, one algorithm, plain functions."""

if __name__ == "agents":
    raise ImportError("import `jrl.agents`: a second copy under another name breaks class identity")
