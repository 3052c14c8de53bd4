"""The core that decides: pure functions and state machines; no socket, thread, clock or chance.

Time is an argument. Methods are of four kinds, after quinn-proto: getters; ``handle_*`` inputs;
commands; ``poll_*`` outputs, which are polled after every input and command. Nothing calls back and
nothing sleeps, so that a test, a simulation and a network drive the very same code.
"""
