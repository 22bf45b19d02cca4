import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.curriculum.dataset import TaskOrder, load_tasks, task_seed
from agentjet.errors import TaskDataError


def test_a_jsonl_file_gives_one_task_a_line(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"n": 1}\n\n{"n": "a\u2028b"}\n', encoding="utf-8")
    assert load_tasks(str(path)) == [{"n": 1}, {"n": "a\u2028b"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"n": 1}\n{"n": \n', "line 2: is not JSON"),
        ('{"n": 1}\n\n[1]\n', "line 3: a task is a JSON object, this is list"),
        ('{"n": NaN}\n', "line 1: a task holds JSON values only"),
        ("\n", "there is no task in it"),
    ],
)
def test_a_broken_file_is_refused_by_line(tmp_path, text, message):
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    with pytest.raises(TaskDataError, match=message):
        load_tasks(str(path))


def test_a_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(TaskDataError, match="can not be read: No such file"):
        load_tasks(str(tmp_path / "none.jsonl"))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(TaskDataError, match="is not UTF-8 text at byte 0"):
        load_tasks(str(tmp_path / "binary.jsonl"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [{'n': 1}, 2]", "task 1: a task is a JSON object, this is int"),
        ("return {'n': 1}", "returned dict, not a list of tasks"),
        ("return [{'n': object()}]", "task 0: a task holds JSON values only"),
        ("raise KeyError('x')", "raised KeyError: 'x'"),
        ("return []", "there is no task in it"),
    ],
)
def test_a_broken_function_is_refused_in_its_own_words(tmp_path, body, message):
    path = tmp_path / "broken_tasks.py"
    path.write_text(f"def tasks():\n    {body}\n")
    with pytest.raises(TaskDataError, match=message):
        load_tasks(f"{path}:tasks")


def test_a_function_gives_its_list(tmp_path):
    path = tmp_path / "good_tasks.py"
    path.write_text("def tasks():\n    return [{'n': (1, 2)}]\n")
    assert load_tasks(f"{path}:tasks") == [{"n": [1, 2]}]
    with pytest.raises(TaskDataError, match="defines no 'other'"):
        load_tasks(f"{path}:other")


@given(st.integers(1, 9), st.integers(0, 99), st.booleans(), st.integers(1, 4))
def test_every_epoch_holds_every_task_once(size, seed, is_shuffled, epochs):
    tasks = [{"n": number} for number in range(size)]
    order = TaskOrder(tasks, seed=str(seed), is_shuffled=is_shuffled, num_epochs=epochs)
    assert order.num_positions == size * epochs
    assert not order.has(size * epochs)
    again = TaskOrder(tasks, seed=str(seed), is_shuffled=is_shuffled, num_epochs=0)
    for epoch in range(epochs):
        played = [order.task(epoch * size + place) for place in range(size)]
        assert sorted(played, key=lambda task: task["n"]) == tasks
        assert is_shuffled or played == tasks
        assert [again.task(epoch * size + place) for place in range(size)] == played


def test_epochs_and_seeds_differ_in_order():
    tasks = [{"n": number} for number in range(20)]
    one = TaskOrder(tasks, seed="1:p", is_shuffled=True, num_epochs=0)
    other = TaskOrder(tasks, seed="2:p", is_shuffled=True, num_epochs=0)
    epochs = [
        [order.task(place)["n"] for place in range(start, start + 20)] for order in (one, other) for start in (0, 20)
    ]
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert one.has(10**9)
    assert one.in_file_order(3) == {"n": 3}


def test_the_order_is_the_same_in_every_version():
    tasks = [{"n": number} for number in range(5)]
    order = TaskOrder(tasks, seed="0:guess", is_shuffled=True, num_epochs=0)
    assert [order.task(place)["n"] for place in range(5)] == [4, 1, 0, 3, 2]
    assert task_seed(0, "guess", 0) == 725457894
    assert task_seed(0, "guess", 1) != task_seed(1, "guess", 0)
