"""`reliablepub demo`: real records published through crashes, and counted on the other side.

It uses the command line and public names only, so that it shows nothing a user could not do.
"""
