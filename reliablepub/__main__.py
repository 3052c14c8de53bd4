"""`python -m reliablepub`: the command line, and nothing else."""

from reliablepub.cli import main

if __name__ == "__main__":
    main()
