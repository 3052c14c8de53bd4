"""Entry point of `python -m reliablepub`: the command line."""

from reliablepub.cli import main

if __name__ == "__main__":
    main()
