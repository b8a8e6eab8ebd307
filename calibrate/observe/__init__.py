"""The engine's own steps: `observer.py` writes them down inside a vLLM, `steps.py` reads what it wrote."""
