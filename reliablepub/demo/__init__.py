"""`reliablepub demo`: publishes real records through crashes, and counts what a consumer receives.

It uses only the command line and public names, so a user can do everything that it shows.
"""
