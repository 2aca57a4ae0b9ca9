"""Documents of several sentences, written for the tests."""

_RIVER = (
    "The river rose again on Monday night. By morning the water had reached the lower streets of "
    "the old town, and the council closed both bridges. Dr. Amara Lee, who measures the river for "
    'the county, said the water would rise for two more days. "We have seen worse, in 1987 and in '
    '2003," she said. "But not this early in the year." Schools near the river stay closed until '
    "Thursday. About 400 people spent the night in the sports hall; nobody was hurt. The council "
    "asks everyone to stay away from the bridges and the lower streets."
)
_BREAD = (
    "Good bread needs four things: flour, water, salt and time. Time is the one that bakers "
    "forget. A dough that rises for two hours is bread; a dough that rises for a day is good "
    "bread.\n\nFlour differs from mill to mill, e.g. in how much water it takes up. Start with 650 "
    "g of water for 1 kg of flour. Knead for ten minutes! Then let the dough rest, fold it, and "
    "let it rest again. Bake it at 240 °C with steam. Is the crust dark? Then the bread is done."
)
_PROGRAM = (
    "This package contains a program that renames files. Names are changed by rules: a rule "
    "replaces text, numbers files, or changes letters to upper or lower case. Rules can be tried "
    "out first, without changing any file. The program v2.1 runs in the terminal and has no "
    "window. It was written at the U.S. Naval Observatory. See http://example.org/rename.html for "
    "rules that others have written."
)
_FRENCH = (
    "Le musée ouvre ses portes à dix heures. L'entrée est gratuite le dimanche ! Les visites "
    "guidées partent toutes les heures, sauf à midi. Le musée est fermé le lundi."
)

DOCUMENTS = (_RIVER, _BREAD, _PROGRAM, _FRENCH)
