"""``python -m copyhold``: the command line where the package was shipped and its console script was not."""

from copyhold.cluster.cli import main

if __name__ == "__main__":
    main()
