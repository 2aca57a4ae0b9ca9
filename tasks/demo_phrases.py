"""Words and sentence templates of the demo tasks; `demo_generator` fills them in.

Every row holds one phrase in the languages of `LANGUAGES`.
"""

LANGUAGES = ("en", "fr", "de")

# Subjects, or objects of "for": the German ones are feminine or neuter, whose accusative equals the
# nominative; the French ones never follow "de" or "à", which would contract.
EVENTS = (
    ("the meeting", "la réunion", "das Treffen"),
    ("the concert", "le concert", "das Konzert"),
    ("the exam", "l’examen", "die Prüfung"),
    ("the conference", "la conférence", "die Konferenz"),
    ("the party", "la fête", "die Feier"),
    ("the lecture", "le cours", "die Vorlesung"),
    ("the exhibition", "l’exposition", "die Ausstellung"),
    ("the performance", "la représentation", "die Vorstellung"),
    ("the game", "le match", "das Spiel"),
    ("the interview", "l’entretien", "das Gespräch"),
    ("the journey", "le voyage", "die Reise"),
    ("the break", "la pause", "die Pause"),
)
BUILDINGS = (
    ("the museum", "le musée", "das Museum"),
    ("the library", "la bibliothèque", "die Bibliothek"),
    ("the school", "l’école", "die Schule"),
    ("the post office", "la poste", "die Post"),
    ("the bank", "la banque", "die Bank"),
    ("the cinema", "le cinéma", "das Kino"),
    ("the theater", "le théâtre", "das Theater"),
    ("the pharmacy", "la pharmacie", "die Apotheke"),
    ("the restaurant", "le restaurant", "das Restaurant"),
    ("the bakery", "la boulangerie", "die Bäckerei"),
    ("the town hall", "la mairie", "das Rathaus"),
    ("the swimming pool", "la piscine", "das Schwimmbad"),
)
GOODS = (
    ("the book", "le livre", "das Buch"),
    ("the lamp", "la lampe", "die Lampe"),
    ("the bicycle", "le vélo", "das Fahrrad"),
    ("the watch", "la montre", "die Uhr"),
    ("the bag", "le sac", "die Tasche"),
    ("the dress", "la robe", "das Kleid"),
    ("the bed", "le lit", "das Bett"),
    ("the painting", "le tableau", "das Gemälde"),
    ("the piano", "le piano", "das Klavier"),
    ("the guitar", "la guitare", "die Gitarre"),
    ("the sofa", "le canapé", "das Sofa"),
    ("the machine", "la machine", "die Maschine"),
)
WOMEN = ("Anna", "Clara", "Emma", "Eva", "Julia", "Laura", "Lena", "Maria", "Nina", "Sarah")
MEN = ("Adam", "David", "Felix", "Hugo", "Martin", "Oscar", "Paul", "Simon", "Thomas", "Victor")

# Countries named without an article in German, whose French article the form of the name tells.
COUNTRIES = (
    "AD AF AL AM AO AR AT AU AZ BA BD BE BF BG BI BJ BO BR BT BW BY BZ CA CI CL CM CN CO CR CZ "
    "DE DK DZ EC EE EG ER ES ET FI FR GA GE GH GL GM GN GQ GR GT GY HN HR HU ID IE IN IS IT JO "
    "JP KE KG KH KP KR KW KZ LA LI LK LR LT LU LV LY MA ME MK ML MR MW MX MY MZ NA NG NI NO NP "
    "NZ PA PE PG PK PL PT PY QA RO RS RU RW SA SE SI SO SR SV SY TG TH TJ TL TM TN TZ UG UY UZ "
    "VE VN ZA ZM ZW"
).split()
MASCULINE_IN_E = {"BZ", "KH", "MX", "MZ", "SR", "ZW"}
CURRENCIES = (
    "AUD BRL CAD CHF CLP COP CZK DKK EGP EUR GBP HUF IDR INR JPY KES KRW MAD MXN NGN NOK NZD PHP "
    "PLN RUB SEK THB TND TRY USD ZAR"
).split()
# Kind of measure -> CLDR unit, largest amount.
UNITS = {
    "distance": (("length-kilometer", 900), ("length-meter", 9000), ("length-mile", 500)),
    "weight": (("mass-kilogram", 200), ("mass-gram", 999), ("mass-pound", 300)),
    "load": (("mass-kilogram", 5000), ("mass-tonne", 90)),
    "volume": (("volume-liter", 9000), ("volume-cubic-meter", 500), ("volume-gallon", 3000)),
    "area": (("area-square-meter", 9000), ("area-hectare", 500), ("area-square-kilometer", 90)),
    "speed": (("speed-kilometer-per-hour", 400), ("speed-meter-per-second", 90)),
    "temperature": (("temperature-celsius", 45), ("temperature-fahrenheit", 110)),
    "memory": (("digital-gigabyte", 900), ("digital-megabyte", 9000), ("digital-terabyte", 90)),
}
# CLDR unit, largest amount, the unit that may follow it, that one's largest amount.
DURATIONS = (("minute", 59, "second", 59), ("hour", 47, "minute", 59), ("day", 30, "hour", 23))
TERMS = (("week", 9, "day", 6), ("month", 11, "week", 3), ("year", 40, "month", 11))
# Seconds in a unit, largest amount before CLDR turns to the next unit.
OFFSETS = ((60, 59), (3600, 23), (86400, 6), (7 * 86400, 4), (30 * 86400, 11), (365 * 86400, 30))
LESS_THAN = ("is less than", "est inférieur à", "ist kleiner als")

# {kind} or {kind_1}, {kind_2}: two different values of one kind.
TEMPLATES = (
    ("{event} is on {date}.", "{event} a lieu le {date}.", "{event} ist am {date}."),
    (
        "{event} begins on {date} at {time}.",
        "{event} commence le {date} à {time}.",
        "{event} beginnt am {date}, um {time}.",
    ),
    (
        "{event} does not begin before {date}.",
        "{event} ne commence pas avant le {date}.",
        "{event} beginnt nicht vor {date}.",
    ),
    ("{event} lasts {duration}.", "{event} dure {duration}.", "{event} dauert {duration}."),
    (
        "{event} ends at {time} and lasts {duration}.",
        "{event} finit à {time} et dure {duration}.",
        "{event} endet um {time} und dauert {duration}.",
    ),
    ("{event} begins {soon}.", "{event} commence {soon}.", "{event} beginnt {soon}."),
    ("{event} ended {ago}.", "{event} a pris fin {ago}.", "{event} endete {ago}."),
    (
        "Does {event} begin at {time}?",
        "Est-ce que {event} commence à {time} ?",
        "Beginnt {event} um {time}?",
    ),
    (
        "{building} opens at {time_1} and closes at {time_2}.",
        "{building} ouvre à {time_1} et ferme à {time_2}.",
        "{building} öffnet um {time_1} und schließt um {time_2}.",
    ),
    (
        "{building} does not open before {time}.",
        "{building} n’ouvre pas avant {time}.",
        "{building} öffnet nicht vor {time}.",
    ),
    ("It is {time} {inside}.", "Il est {time} {inside}.", "{inside} ist es {time}."),
    (
        "Please call {name} at {time}.",
        "Veuillez appeler {name} à {time}.",
        "Bitte rufen Sie {name} um {time} an.",
    ),
    (
        "Today is {today}.",
        "Aujourd’hui, nous sommes le {today}.",
        "Heute ist {today}.",
    ),
    (
        "Destination: {territory}; departure: {weekday}.",
        "Destination : {territory} ; départ : {weekday}.",
        "Ziel: {territory}; Abreise: {weekday}.",
    ),
    (
        "The contract is valid until {day}.",
        "Le contrat est valable jusqu’au {day}.",
        "Der Vertrag gilt bis zum {day}.",
    ),
    ("The contract runs for {term}.", "Le contrat dure {term}.", "Der Vertrag läuft {term}."),
    (
        "The invoice of {past} comes to {money}.",
        "La facture du {past} s’élève à {money}.",
        "Die Rechnung vom {past} beträgt {money}.",
    ),
    (
        "{woman} was born {inside} on {past}.",
        "{woman} est née {inside} le {past}.",
        "{woman} wurde am {past} {inside} geboren.",
    ),
    (
        "{man} was born {inside} on {past}.",
        "{man} est né {inside} le {past}.",
        "{man} wurde am {past} {inside} geboren.",
    ),
    (
        "{name} has lived {inside} since {past}.",
        "{name} vit {inside} depuis le {past}.",
        "{name} lebt seit dem {past} {inside}.",
    ),
    (
        "{name} has been learning {studied} since {past}.",
        "{name} apprend {studied} depuis le {past}.",
        "{name} lernt seit dem {past} {studied}.",
    ),
    (
        "{name} walked {distance} on {past}.",
        "{name} a parcouru {distance} à pied le {past}.",
        "{name} ist am {past} {distance} gelaufen.",
    ),
    (
        "{name} comes {origin} and speaks {language}.",
        "{name} vient {origin} et parle {language}.",
        "{name} kommt {origin} und spricht {language}.",
    ),
    (
        "{name} lives {inside} and speaks {language_1} and {language_2}.",
        "{name} vit {inside} et parle {language_1} et {language_2}.",
        "{name} lebt {inside} und spricht {language_1} und {language_2}.",
    ),
    (
        "{name} speaks {language_1}, but not {language_2}.",
        "{name} parle {language_1}, mais pas {language_2}.",
        "{name} spricht {language_1}, aber kein {language_2}.",
    ),
    (
        "Do you speak {language_1} or {language_2}?",
        "Parlez-vous {language_1} ou {language_2} ?",
        "Sprechen Sie {language_1} oder {language_2}?",
    ),
    (
        "Destination: {territory}; currency: {currency}; language: {language}.",
        "Destination : {territory} ; monnaie : {currency} ; langue : {language}.",
        "Ziel: {territory}; Währung: {currency}; Sprache: {language}.",
    ),
    (
        "The flight {goal} leaves at {time}.",
        "Le vol {goal} part à {time}.",
        "Der Flug {goal} startet um {time}.",
    ),
    (
        "The flight {goal} takes {duration}.",
        "Le vol {goal} dure {duration}.",
        "Der Flug {goal} dauert {duration}.",
    ),
    (
        "The letter {origin} arrived {ago}.",
        "La lettre {origin} est arrivée {ago}.",
        "Der Brief {origin} ist {ago} angekommen.",
    ),
    ("{goods} costs {money}.", "{goods} coûte {money}.", "{goods} kostet {money}."),
    (
        "{name} paid {money} for {goods}.",
        "{name} a payé {money} pour {goods}.",
        "{name} hat {money} für {goods} bezahlt.",
    ),
    (
        "{goods} weighs {weight} and costs {money}.",
        "{goods} pèse {weight} et coûte {money}.",
        "{goods} wiegt {weight} und kostet {money}.",
    ),
    (
        "The river is {distance} long.",
        "La rivière fait {distance} de long.",
        "Der Fluss ist {distance} lang.",
    ),
    ("The tank holds {volume}.", "Le réservoir contient {volume}.", "Der Tank fasst {volume}."),
    ("The garden measures {area}.", "Le jardin mesure {area}.", "Der Garten misst {area}."),
    ("The file takes up {memory}.", "Le fichier occupe {memory}.", "Die Datei belegt {memory}."),
    (
        "The temperature {inside} is {temperature}.",
        "La température {inside} est de {temperature}.",
        "Die Temperatur {inside} beträgt {temperature}.",
    ),
    (
        "Top speed: {speed}; load: {load}.",
        "Vitesse maximale : {speed} ; charge : {load}.",
        "Höchstgeschwindigkeit: {speed}; Last: {load}.",
    ),
    ("The answer is {number}.", "La réponse est {number}.", "Die Antwort ist {number}."),
    ("{comparison}.", "{comparison}.", "{comparison}."),
    (
        "The town has {count} inhabitants.",
        "La ville compte {count} habitants.",
        "Die Stadt hat {count} Einwohner.",
    ),
    (
        "The library owns {count} books.",
        "La bibliothèque possède {count} livres.",
        "Die Bibliothek besitzt {count} Bücher.",
    ),
    (
        "{name} has written {count} words.",
        "{name} a écrit {count} mots.",
        "{name} hat {count} Wörter geschrieben.",
    ),
    (
        "The company employs {count} workers {inside}.",
        "L’entreprise emploie {count} ouvriers {inside}.",
        "Die Firma beschäftigt {inside} {count} Arbeiter.",
    ),
)
