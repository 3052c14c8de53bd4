"""The sans-I/O core: pure functions and state machines without socket, thread, clock or randomness.

Time is an argument. As in quinn-proto there are four kinds of methods: getters; ``handle_*``
inputs; commands; ``poll_*`` outputs, polled after every input and command. The core never sleeps,
and reports nothing by callback: it calls only functions that answer a question, such as the size of
a message. So unit tests, the simulation and the relay drive identical code.
"""
