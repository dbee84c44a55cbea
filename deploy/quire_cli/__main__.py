"""`python -m quire_cli` is the same as `quire`."""

from quire_cli.main import main

if __name__ == "__main__":
    main()
