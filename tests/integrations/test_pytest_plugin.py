"""The pytest plugin, in pytest runs of its own."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

BUGGY = """
import torch

def step():
    weight = torch.ones(2, requires_grad=True)
    shown = weight.exp()
    shown += 1
    return shown.sum()
"""


@pytest.fixture
def own(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(buggy=BUGGY)
    return pytester


def run(own: pytest.Pytester, *args: str) -> pytest.RunResult:
    return own.runpytest_subprocess("-p", "no:cacheprovider", *args)


def test_the_option_guards_every_test(own: pytest.Pytester) -> None:
    own.makepyfile("from buggy import step\ndef test_step():\n    step().backward()\ndef test_fine():\n    pass\n")
    done = run(own, "--gradguard=strict")
    done.assert_outcomes(failed=1, passed=1)
    done.stdout.fnmatch_lines(["*GG101*"])


def test_without_option_and_marker_nothing_is_guarded(own: pytest.Pytester) -> None:
    own.makepyfile(
        "import pytest\nfrom buggy import step\nfrom gradguard import GradGuardError\n"
        "def test_step():\n    with pytest.raises(RuntimeError) as caught:\n        step().backward()\n"
        "    assert not isinstance(caught.value, GradGuardError)\n"
    )
    run(own).assert_outcomes(passed=1)


def test_an_unguarded_run_does_not_load_torch(own: pytest.Pytester) -> None:
    own.makepyfile("import sys\ndef test_it():\n    assert 'torch' not in sys.modules\n")
    run(own).assert_outcomes(passed=1)


def test_a_warning_fails_the_test_too(own: pytest.Pytester) -> None:
    own.makepyfile(
        """
        import torch, pytest

        @pytest.mark.gradguard("standard")
        def test_training():
            w = torch.nn.Parameter(torch.ones(2))
            optimizer = torch.optim.SGD([w], lr=.1)
            for _ in range(4):
                (w ** 2).sum().backward()
                optimizer.step()
        """
    )
    done = run(own)
    done.assert_outcomes(failed=1, warnings=1)
    done.stdout.fnmatch_lines(["*stale-gradients*"])


def test_the_marker_chooses_and_switches_off(own: pytest.Pytester) -> None:
    own.makepyfile(
        """
        import pytest
        from buggy import step

        @pytest.mark.gradguard("off")
        def test_off():
            with pytest.raises(RuntimeError):
                step().backward()

        @pytest.mark.gradguard(level="watch", trace__every=5)
        def test_settings():
            step().backward()
        """
    )
    done = run(own, "--gradguard")
    done.assert_outcomes(passed=1, failed=1)


def test_a_level_that_does_not_exist(own: pytest.Pytester) -> None:
    own.makepyfile("import pytest\n@pytest.mark.gradguard('loud')\ndef test_it():\n    pass\n")
    done = run(own)
    assert "not 'loud'" in done.stdout.str() + done.stderr.str()


def test_the_fixture(own: pytest.Pytester) -> None:
    own.makepyfile(
        """
        import pytest
        from buggy import step

        def test_step(gradguard):
            with pytest.raises(RuntimeError, match="GG101"):
                step().backward()
            assert [each.code for each in gradguard.diagnoses] == ["GG101"]
        """
    )
    run(own).assert_outcomes(passed=1)
