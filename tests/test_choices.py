import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlm_decode.errors import InvalidInputError
from dlm_decode.eval.choices import parse_choice

SIX = ["Arson", "Normal", "Burglary", "A man fighting", "Vandalism", "Best shot"]
EGO = [
    "C sorts screws by size because the shelf is labelled.",
    "C repairs a radio and consults a manual kept on the shelf.",
    "C sands a wooden stool, going to the shelf for finer paper.",
    "C adds water. Then c throws the dough away.",
    "C waits for a parcel, passing time near the shelf.",
]
COUNTS = ["3", "1", "4", "2"]


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("A", "A"),
        ("b", "B"),
        ("F", "F"),
        ("(A)", "A"),
        ("(f)", "F"),
        ("[C]", "C"),
        ("A.", "A"),
        ("A)", "A"),
        ("A:", "A"),
        ("E,", "E"),
        ("D\n", "D"),
        ("  B  ", "B"),
        ("B. Normal", "B"),
        ("(B) Vandalism", "B"),
        ("B) Vandalism", "B"),
        ("E: the window is broken", "E"),
        ("C - Burglary", "C"),
        ("B because nothing happens", "B"),
        ("F\nBecause of the flash.", "F"),
        ("**B**", "B"),
        ("**(B)**", "B"),
        ("`C`", "C"),
        ('"D"', "D"),
        ("<answer>E</answer>", "E"),
        ("\\boxed{C}", "C"),
        ("\uff08\uff23\uff09", "C"),
        ("Answer: B", "B"),
        ("answer: b", "B"),
        ("**Answer:** E", "E"),
        ("Answer: (F)", "F"),
        ("Answer:F.", "F"),
        ("The answer is (E).", "E"),
        ("The answer is E", "E"),
        ("the correct answer is: C", "C"),
        ("The answer is option D.", "D"),
        ("The answer would be C, because of the door.", "C"),
        ("Best option: (F)", "F"),
        ("Best Option: (B) Normal", "B"),
        ("Option C is correct.", "C"),
        ("Option (C) fits.", "C"),
        ("Option B", "B"),
        ("Option A is wrong. Option B is correct.", "B"),
        ("(A) is incorrect. (B) is correct.", "B"),
        ("(A) is wrong, which leaves (D).", "D"),
        ("(A) is inside the house.", "A"),
        ("B. It is not option A.", "B"),
        ("B. Option A is wrong because of the door.", "B"),
        ("I think the answer might be B", "B"),
        ("Final Answer: $\\boxed{B}$", "B"),
        ("So I choose option F.", "F"),
        ("B is the correct answer.", "B"),
        ("(A) looks wrong. The answer is (C).", "C"),
        ("The answer is A. No, wait. The answer is B.", "B"),
        ("A man breaks a window, so E", "E"),
        ("A man breaks a window, therefore (E).", "E"),
        ("A man breaks a window.\nE", "E"),
        ("I would choose F.", "F"),
        ("It must be the one with the fire (A)", "A"),
        ("Arson", "A"),
        ("vandalism.", "E"),
        ("This shows vandalism in a street.", "E"),
        ("A man fighting", "D"),
        ("A man fighting with a guard.", "D"),
        ("Best shot", "F"),
        # nothing that can be read
        ("", None),
        (" \n", None),
        ("A man walks along the street", None),
        ("a man", None),
        ("An accident", None),
        ("Best", None),
        ("Both", None),
        ("Because", None),
        ("Bad Fire Escape Doors", None),
        ("e.g. a fire", None),
        ("A.M. traffic", None),
        ("The answer is a man", None),
        ("Answer: A man walks", None),
        ("Answer: Because", None),
        ("The answer is not B", None),
        ("It is not option A.", None),
        ("I would not choose B", None),
        ("(A) is wrong.", None),
        ("(A) isn't right.", None),
        ("(A) is not the answer, (B) is", "B"),
        ("Option A: Arson. Option B: Normal. Option C: Burglary.", None),
        ("(A) Arson\n(B) Normal\n(C) Burglary\n(D) A man fighting", None),
        ("A. Arson\nB. Normal\nC. Burglary\nAnswer: B", "B"),
        ("A. Arson\nB. Normal\nC. Burglary\nso B", "B"),
        ("I am not sure.", None),
        ("Arson or vandalism", None),
        ("normally", None),
        # several, or none of the question's
        ("A and B", None),
        ("A, B", None),
        ("A/B", None),
        ("(A) or (B)", None),
        ("Answer: A or C", None),
        ("Answer: A, B and C", None),
        ("either (A) or (B)", None),
        ("G", None),
        ("(G) Vandalism", None),
        ("Answer: H", None),
        ("AB", None),
        ("1", None),
    ],
)
def test_six_options(text, letter):
    assert parse_choice(text, SIX) == letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("C repairs a radio and consults a manual kept on the shelf.", "B"),
        ("C repairs a radio and consults a manual kept on the shelf", "B"),
        ("C waits for a parcel, passing time near the shelf, as the clip shows.", "E"),
        ("C adds water. Then c throws the dough away.", "D"),
        ("B. C repairs a radio", "B"),
        ("B: C repairs a radio", "B"),
        ("C. C sands a wooden stool", "C"),
        ("C", "C"),
        ("The answer is C.", "C"),
        ("Answer: C is washing dishes", None),
        ("C repairs a bicycle", None),
        ("C is the camera wearer", None),
        ("The camera wearer is C.", None),
        ("C and another person cook", None),
        ("The video shows C.", None),
        ("F", None),
        ("(F)", None),
        ("Answer: F", None),
    ],
)
def test_egoschema_calls_a_person_c(text, letter):
    assert parse_choice(text, EGO) == letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("2", "D"),
        ("2.", "D"),
        ("It occurs 4 times.", "C"),
        ("(C)", "C"),
        ("D) 2", "D"),
        ("24", None),
        ("2 or 3 times", None),
        ("E", None),
    ],
)
def test_numbers_as_options(text, letter):
    assert parse_choice(text, COUNTS) == letter


def test_an_option_inside_another_is_no_second_mention():
    options = ["red car", "dark red car", "blue car"]
    assert parse_choice("It was a dark red car", options) == "B"
    assert parse_choice("It was a red car", options) == "A"
    assert parse_choice("a dark red car or a blue car", options) is None
    assert parse_choice("a dark red car or a red car", options) is None


def test_only_the_letters_of_the_question():
    for count in range(1, 7):
        options = [f"thing {number}" for number in range(count)]
        for index, letter in enumerate("ABCDEFG"):
            for form in ("{}", "({})", "{}.", "Answer: {}", "The answer is ({})."):
                expected = letter if index < count else None
                assert parse_choice(form.format(letter), options) == expected


def test_equal_options_give_the_first_letter():
    assert parse_choice("twice", ["once", "twice", "twice"]) == "B"


@given(st.text(alphabet="ABCFGabc ().:,\n\\*answer is option not so", max_size=40))
def test_whatever_is_said_the_letter_is_one_of_the_question_s(text):
    letter = parse_choice(text, SIX[:3])
    assert letter in (None, "A", "B", "C")
    assert letter is None or any(
        word in text.casefold() for word in (letter.lower(), SIX["ABC".index(letter)].casefold())
    )


def test_bad_options():
    for options in ([], ["x"] * 27):
        with pytest.raises(InvalidInputError, match="1 to 26 options"):
            parse_choice("A", options)
