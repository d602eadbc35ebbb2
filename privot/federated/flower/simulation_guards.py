"""Context managers around Flower's simulation: quiet logs, a token for Ray, and Ctrl-C."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def silence_flower() -> Iterator[None]:
    """Silence Flower's log, and restore the PYTHONPATH that Flower changes."""
    logger = logging.getLogger("flwr")
    python_path = os.environ.get("PYTHONPATH")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        os.environ.pop("PYTHONPATH", None)
        if python_path is not None:
            os.environ["PYTHONPATH"] = python_path


@contextlib.contextmanager
def require_ray_token() -> Iterator[None]:
    """Protect Ray with a random token.

    Ray listens on every address of the machine, and whoever reaches it could run code in it.
    """
    from ray._raylet import AuthenticationTokenLoader, Config

    def reload_ray_config() -> None:  # Ray reads its settings when it is imported
        AuthenticationTokenLoader.instance().reset_cache()
        Config.initialize("")

    previous = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    reload_ray_config()
    try:
        yield
    finally:
        for name, value in previous.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        reload_ray_config()


@contextlib.contextmanager
def catch_interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed.

    Flower's simulation would hang on an interrupt. So the interrupt is only recorded, and the run
    ends after the current message.
    """
    is_interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield is_interrupted.is_set
        return
    previous = signal.signal(signal.SIGINT, lambda *_: is_interrupted.set())
    try:
        yield is_interrupted.is_set
    finally:
        signal.signal(signal.SIGINT, previous)
