"""Chat templates are untrusted code: limits hold, the sandbox holds, a failure leaves no trace."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from server.chat_template import ChatTemplate, TemplateError
from tests.support.tokenizers import CHATML, template

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "bad",
    [
        "{{ raise_exception('no') }}",
        "{{ nothing.at.all }}",
        "{% for a in range(9**9) %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 1 + 'a' }}",
    ],
)
def test_failure_leaves_no_trace(bad: str) -> None:
    """B050."""
    source = "{% if messages[0].content == 'bad' %}" + bad + "{% endif %}" + CHATML
    with template(source) as made, template(source) as fresh:
        with pytest.raises(TemplateError):
            made.render([{"role": "user", "content": "bad"}])
        assert made.render(HI) == fresh.render(HI)


def test_failure_shows_no_source() -> None:
    """B049."""
    with template("{% set secret = 'source' %}{{ 1 + messages }}") as made:
        with pytest.raises(TemplateError) as caught:
            made.render(HI)
        assert "secret" not in str(caught.value)
        assert "\n" not in str(caught.value)


RUNAWAYS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{% set n = messages | length + 9 %}{{ n ** (n ** 8) % 7 }}",
    "constant power": "{{ 7 ** (10 ** 8) % 7 }}",
}
HUGE = {
    "product": "{{ 'A' * 10 ** 9 }}",
    "doubling": "{% set n = namespace(t='aa') %}{% for i in range(60) %}"
    "{% set n.t = n.t ~ n.t %}{% endfor %}",
    "width": "{{ 'a'.ljust(10 ** 10) }}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "output": "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
}


@pytest.mark.parametrize("source", RUNAWAYS.values(), ids=RUNAWAYS.keys())
def test_runaway_template_is_stopped_in_time(source: str) -> None:
    """B154."""
    with template(source, max_seconds=0.3) as made:
        began = time.monotonic()
        with pytest.raises(TemplateError, match=r"longer than 0\.3 s"):
            made.start()
        assert time.monotonic() - began < 20


@pytest.mark.parametrize("source", HUGE.values(), ids=HUGE.keys())
def test_template_that_wants_too_much_is_stopped(source: str) -> None:
    """B154."""
    made = ChatTemplate(source, max_seconds=20.0, max_output_chars=10**6)
    with pytest.raises(TemplateError, match=r"too much memory|too deep|too long"):
        made.render(HI)
    made.close()


@pytest.mark.parametrize(
    "source", ["{{ 1 | nosuchfilter }}", "{% if %}", "{{ ((((", "{% endfor %}"]
)
def test_broken_template_is_refused_at_start(source: str) -> None:
    """B154: undefined filters and broken syntax, each one clear line."""
    with template(source) as made:
        with pytest.raises(TemplateError, match="could not be used: line 1") as caught:
            made.start()
        assert "\n" not in str(caught.value)


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ raise_exception.__globals__['os'].system('true') }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ lipsum.__globals__['os'].system('true') }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{% set messages[0].role = 'x' %}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ self.__init__.__globals__ }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_sandbox_holds(source: str, tmp_path: Path) -> None:
    """B155: nothing is executed, nothing inside Python is shown."""
    harm = tmp_path / "harm"
    source = source.replace("'true'", f"'touch {harm}'") + "{{ messages[0].content }}"
    with template(source) as made:
        with pytest.raises(TemplateError, match="could not be used") as caught:
            made.render(HI)
        assert "object at" not in str(caught.value)
        assert "<class" not in str(caught.value)
    assert not harm.exists()


def test_threads_share_a_template() -> None:
    found: dict[int, str] = {}
    with template(CHATML) as made:

        def work(index: int) -> None:
            found[index] = made.render([{"role": "user", "content": f"<{index}>"}])

        threads = [threading.Thread(target=work, args=(index,)) for index in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(f"<{index}>" in found[index] for index in range(16))


def test_killed_child_is_replaced() -> None:
    with template(CHATML) as made:
        first = made.render(HI)
        child = made._process._child
        assert child is not None
        os.kill(child._process.pid, signal.SIGKILL)
        child._process.wait()
        assert made.render(HI) == first


def test_child_ends_with_its_template() -> None:
    made = ChatTemplate(CHATML)
    made.start()
    child = made._process._child
    assert child is not None
    process = child._process
    del made, child
    gc.collect()
    assert process.returncode == -signal.SIGKILL
