"""Whole words and their negations say which folders hold good parts."""

import pytest

from lit_data.datasets.good_names import describe_doubt, find_good_names, name_kinds, names_defect

GOOD = """good Good GOOD goods very_good good_1 good(2) OK ok okay OK_2024 ok_parts train_good i.O. iO IO
normal pass passed PASS_1 intact healthy clean perfect flawless defect_free crack-free no_defect
no_defects noDefect without_defect w/o_defect non_defective free_of_defects undamaged Gut Gutteile
in_Ordnung fehlerfrei ohne_Fehler keine_Fehler bon conforme sans_défaut buono bueno sin_defectos
sem_defeito goed 良品 合格"""
BAD = """not_ok NotOK not-good no_good non-normal non_good unacceptable unaccepted abnormal ab_normal
no_pass NOK nok NG ng KO ko n.i.O. niO NIO bad bad_ok ok_bad defect defective good_crack un-ok failed
not_defect_free nicht_ok nicht_in_Ordnung Fehler Ausschuss défaut mauvais difetto malo 不良 不合格"""
DOUBTFUL = ["nearly_good", "ok_scratchy", "fine", "smoke_free", "good_enough"]
OTHERS = ["goodness", "book", "token", "passport", "a", "lot1", "images", "normandy", "2024"]


@pytest.mark.parametrize("name", [*GOOD.split(), "no defects"])
def test_good_parts_are_called_so(name: str) -> None:
    assert find_good_names([name, "scratch_x"]) == {name}
    assert not names_defect(name)


@pytest.mark.parametrize("name", [*BAD.split(), "not good"])
def test_what_is_not_good_is_a_defect(name: str) -> None:
    assert not find_good_names([name, "good"]) - {"good"}
    assert names_defect(name)
    assert name_kinds([[name], ["ok"]]) == (name, "good")


@pytest.mark.parametrize("name", OTHERS)
def test_other_words_say_nothing(name: str) -> None:
    assert not find_good_names([name])
    assert not names_defect(name)


@pytest.mark.parametrize("name", DOUBTFUL)
def test_a_word_for_good_beside_unknown_ones_is_asked_about(name: str) -> None:
    kinds = name_kinds([["good"], [name], ["bad"]])
    assert kinds == ("good", name, "bad")
    assert name in describe_doubt(kinds)


def test_words_that_all_folders_share_say_nothing() -> None:
    assert find_good_names(["MT_Free", "MT_Crack", "MT_Break"]) == {"MT_Free"}
    assert find_good_names(["good_cap", "bad_cap"]) == {"good_cap"}
    assert not find_good_names(["not_ok", "not_good"])


def test_folders_none_of_which_is_good_are_asked_about() -> None:
    for kinds in (["A", "B"], ["lot1", "lot2"], ["damaged", ""], ["Fehler"], ["bad", "scratch"]):
        assert "no folder is known to hold good parts" in describe_doubt(kinds)
    for kinds in (["good", "A"], ["images"], [""], ["good", ""]):
        assert not describe_doubt(kinds)


def test_kinds_are_at_the_level_of_good_ones() -> None:
    products = [["cap", "good"], ["cap", "bent"], ["nut", "good"]]
    assert name_kinds(products) == ("good", "bent", "good")
    assert name_kinds([["MT_Free", "x"], ["MT_Crack", "x"]]) == ("good", "MT_Crack")
    assert name_kinds([["damaged", "ok"], ["A", "ok"]]) == ("damaged", "A")


def test_folders_may_be_called_good(caplog: pytest.LogCaptureFixture) -> None:
    folders = [["A"], ["ok"], ["lot 2"], []]
    assert name_kinds(folders, ["A"]) == ("good", "ok", "lot 2", "")
    assert name_kinds(folders, ["lot*", "ok"]) == ("A", "good", "good", "")
    assert name_kinds(folders, ["*"]) == ("good",) * 4
    assert not caplog.messages
    assert name_kinds(folders, ["A", "B"])[0] == "good"
    assert caplog.messages == ["data.good: 'B' matches no folder of images"]
    assert "data.good=['C'] names none of the folders A, ok" in describe_doubt(["A", "ok"], ["C"])
