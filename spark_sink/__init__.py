"""The Spark DataSource of reliablepub: `df.write.format("rabbitmq")`.

It enters through the public names of `reliablepub`, like any other application, and must never know
the rooms behind them: no core, no outbox, no transport, no client library.
"""
