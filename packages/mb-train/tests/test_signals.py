"""Signals that ask to save and stop, or to stop at once."""

import os
import signal
import threading

import pytest
from mb_train.machine.signals import interrupting, stop_signals


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_raises_the_flag_and_nothing_else(name):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with stop_signals() as flag:
        assert not flag
        os.kill(os.getpid(), number)
        assert flag
        assert flag.reason == name
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_ends_what_is_written_as_a_ctrl_c_does(name):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), interrupting():
        signal.getsignal(number)(number, None)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("others", [("SIGTERM", "SIGINT"), ("SIGINT", "SIGTERM")])
def test_a_second_ctrl_c_ends_at_once(others):
    with stop_signals() as flag:
        for name in others:
            os.kill(os.getpid(), getattr(signal, name))
            assert flag.reason == name
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals() as flag:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not flag
    finally:
        signal.signal(signal.SIGHUP, before)


def test_in_another_thread_the_flag_never_rises():
    seen = []

    def run():
        with stop_signals() as flag:
            seen.append(bool(flag))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [False]
