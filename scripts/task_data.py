"""What the built-in model's tasks are made of: names, facts, texts and functions. See `mstar.scripts.tasks`."""

from __future__ import annotations

NAMES = (
    "Ada", "Alan", "Amir", "Anna", "Bela", "Ben", "Carla", "Chen", "Clara", "Dan", "Dara", "Elif",
    "Emma", "Eric", "Femi", "Fay", "Gus", "Hana", "Hugo", "Ines", "Ivan", "Jack", "Jana", "Kai", "Kira",
    "Lars", "Lena", "Leo", "Lin", "Mara", "Maya", "Milo", "Nadia", "Nils", "Nina", "Omar", "Olga",
    "Pavel", "Petra", "Quinn", "Rosa", "Ravi", "Sara", "Sven", "Tara", "Theo", "Uma", "Vera", "Viktor",
    "Wren", "Yara", "Yusuf", "Zoe",
)  # fmt: skip

COLOURS = (
    "red", "blue", "green", "yellow", "orange", "purple", "black", "white", "silver", "gold", "teal",
    "violet", "crimson", "amber", "indigo", "olive",
)  # fmt: skip

ANIMALS = (
    "cat", "dog", "horse", "fox", "owl", "bear", "wolf", "otter", "heron", "tiger", "rabbit", "badger",
    "falcon", "turtle", "lynx", "crow",
)  # fmt: skip

OBJECTS = (
    "brass key",
    "wooden box",
    "silver coin",
    "glass lantern",
    "torn map",
    "clay cup",
    "rusty compass",
    "small drum",
    "blue feather",
    "stone ring",
    "paper boat",
    "old violin",
)

PLACES = (
    "harbour",
    "forest",
    "market",
    "lighthouse",
    "mill",
    "valley",
    "library",
    "station",
    "orchard",
    "mountain pass",
    "village square",
    "river bank",
)

FRUITS = (
    "apples", "pears", "plums", "figs", "lemons", "oranges", "cherries", "grapes", "melons", "peaches",
)  # fmt: skip

# country: capital
CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "Poland": "Warsaw",
    "Austria": "Vienna",
    "Hungary": "Budapest",
    "Greece": "Athens",
    "Turkey": "Ankara",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Iceland": "Reykjavik",
    "Ireland": "Dublin",
    "Belgium": "Brussels",
    "Netherlands": "Amsterdam",
    "Switzerland": "Bern",
    "Czechia": "Prague",
    "Slovakia": "Bratislava",
    "Romania": "Bucharest",
    "Bulgaria": "Sofia",
    "Serbia": "Belgrade",
    "Croatia": "Zagreb",
    "Ukraine": "Kyiv",
    "Russia": "Moscow",
    "Estonia": "Tallinn",
    "Latvia": "Riga",
    "Lithuania": "Vilnius",
    "Egypt": "Cairo",
    "Morocco": "Rabat",
    "Kenya": "Nairobi",
    "Nigeria": "Abuja",
    "Ghana": "Accra",
    "Ethiopia": "Addis Ababa",
    "Senegal": "Dakar",
    "Tunisia": "Tunis",
    "Algeria": "Algiers",
    "Uganda": "Kampala",
    "Japan": "Tokyo",
    "China": "Beijing",
    "India": "New Delhi",
    "Thailand": "Bangkok",
    "Vietnam": "Hanoi",
    "Indonesia": "Jakarta",
    "Malaysia": "Kuala Lumpur",
    "Philippines": "Manila",
    "South Korea": "Seoul",
    "Mongolia": "Ulaanbaatar",
    "Nepal": "Kathmandu",
    "Pakistan": "Islamabad",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "Jordan": "Amman",
    "Israel": "Jerusalem",
    "Qatar": "Doha",
    "Australia": "Canberra",
    "New Zealand": "Wellington",
    "Canada": "Ottawa",
    "Mexico": "Mexico City",
    "Cuba": "Havana",
    "Brazil": "Brasilia",
    "Argentina": "Buenos Aires",
    "Chile": "Santiago",
    "Peru": "Lima",
    "Colombia": "Bogota",
    "Ecuador": "Quito",
    "Uruguay": "Montevideo",
    "Venezuela": "Caracas",
}

# name and symbol, by atomic number from 1
ELEMENTS = (
    ("Hydrogen", "H"),
    ("Helium", "He"),
    ("Lithium", "Li"),
    ("Beryllium", "Be"),
    ("Boron", "B"),
    ("Carbon", "C"),
    ("Nitrogen", "N"),
    ("Oxygen", "O"),
    ("Fluorine", "F"),
    ("Neon", "Ne"),
    ("Sodium", "Na"),
    ("Magnesium", "Mg"),
    ("Aluminium", "Al"),
    ("Silicon", "Si"),
    ("Phosphorus", "P"),
    ("Sulfur", "S"),
    ("Chlorine", "Cl"),
    ("Argon", "Ar"),
    ("Potassium", "K"),
    ("Calcium", "Ca"),
    ("Scandium", "Sc"),
    ("Titanium", "Ti"),
    ("Vanadium", "V"),
    ("Chromium", "Cr"),
    ("Manganese", "Mn"),
    ("Iron", "Fe"),
    ("Cobalt", "Co"),
    ("Nickel", "Ni"),
    ("Copper", "Cu"),
    ("Zinc", "Zn"),
    ("Gallium", "Ga"),
    ("Germanium", "Ge"),
    ("Arsenic", "As"),
    ("Selenium", "Se"),
    ("Bromine", "Br"),
    ("Krypton", "Kr"),
)

EXPLANATIONS = {
    "why Earth has seasons": (
        "Earth's seasons are caused by the tilt of its axis. As Earth orbits the Sun, each hemisphere "
        "leans toward the Sun for part of the year and away from it for the rest. The hemisphere that "
        "leans toward the Sun receives more direct light and has summer, while the other has winter."
    ),
    "how rainbows form": (
        "A rainbow forms when sunlight enters drops of water in the air. Each drop bends the light, "
        "reflects it from its back surface and bends it again. Different colours bend by different "
        "amounts, so the light spreads into bands from red to violet."
    ),
    "how photosynthesis works": (
        "Photosynthesis is how plants turn light into food. Leaves absorb light, water and carbon "
        "dioxide. The plant uses the energy of the light to build sugar and releases oxygen as a "
        "by-product."
    ),
    "what a hash table is": (
        "A hash table stores values under keys. A hash function turns each key into an index of an "
        "array, and the value is kept at that index. When two keys share an index, the table keeps both "
        "and compares the keys. Look-ups take constant time on average."
    ),
    "how vaccines work": (
        "A vaccine shows the immune system a harmless part of a germ. The body learns to recognise it "
        "and makes memory cells. When the real germ arrives later, the immune system answers quickly and "
        "the illness is mild or does not start."
    ),
    "why the sky is blue": (
        "Sunlight contains all colours. Molecules of air scatter short wavelengths more than long ones, "
        "so blue light is spread across the whole sky. At sunset the light crosses more air, most of the "
        "blue is lost and the sky looks red."
    ),
    "how a battery works": (
        "A battery turns chemical energy into electrical energy. Inside it two different materials react "
        "with an electrolyte. Electrons leave one side, flow through the circuit and return on the other "
        "side, and the flow powers a device."
    ),
    "what an operating system does": (
        "An operating system manages the hardware of a computer. It shares the processor among programs, "
        "gives each program memory, keeps files on disks and talks to devices. Programs ask it for help "
        "through system calls."
    ),
    "how tides happen": (
        "Tides are caused by the gravity of the Moon and the Sun. The Moon pulls the water on the near "
        "side more strongly than the Earth, and on the far side less strongly, so two bulges form. As "
        "the Earth turns, coasts pass through the bulges and the water rises and falls."
    ),
    "what machine learning is": (
        "Machine learning is a way to build programs from examples. Instead of writing rules, a person "
        "gives a model data and a measure of error. The model changes its parameters until the error is "
        "small and can then make predictions about new data."
    ),
    "how a refrigerator works": (
        "A refrigerator moves heat from the inside to the outside. A fluid evaporates in tubes inside "
        "the box and absorbs heat. A compressor squeezes the vapour, it condenses behind the box and "
        "gives the heat to the room."
    ),
    "what a binary search is": (
        "A binary search finds a value in a sorted list. It looks at the middle item, and keeps the half "
        "that can contain the value. Each step halves the range, so a list of a million items needs "
        "about twenty steps."
    ),
    "how speculative decoding works": (
        "Speculative decoding makes a language model faster. A small draft guesses the next few tokens, "
        "and the large model checks all of them in one pass. Guesses that match are kept, the first "
        "wrong one is replaced, and the output is the same as without the draft."
    ),
    "what tensor parallelism is": (
        "Tensor parallelism splits each layer of a model across several devices. Every device holds a "
        "slice of the weights, computes a part of the result, and the parts are summed with an "
        "all-reduce. The model can be larger than one device, and each step is faster."
    ),
}

TIPS = {
    "writing clean code": (
        "Use clear, descriptive names.",
        "Keep functions small and focused.",
        "Write meaningful comments.",
        "Avoid duplicate code.",
        "Test each change.",
        "Handle errors early.",
        "Remove dead code.",
    ),
    "sleeping better": (
        "Go to bed at the same time each day.",
        "Keep the room dark and cool.",
        "Avoid screens before bed.",
        "Drink less coffee after noon.",
        "Take a short walk in the evening.",
        "Read a calm book.",
    ),
    "learning a language": (
        "Practise a little every day.",
        "Listen to native speakers.",
        "Keep a list of new words.",
        "Speak from the first week.",
        "Read simple stories.",
        "Do not fear mistakes.",
    ),
    "saving money": (
        "Write down what you spend.",
        "Cook at home more often.",
        "Set a goal for each month.",
        "Compare prices before you buy.",
        "Cancel what you do not use.",
        "Save a part of each income first.",
    ),
    "starting a garden": (
        "Choose a sunny place.",
        "Test the soil first.",
        "Begin with easy plants.",
        "Water in the morning.",
        "Remove weeds each week.",
        "Add compost in spring.",
    ),
    "giving a talk": (
        "Know your main message.",
        "Begin with a short story.",
        "Use few slides.",
        "Practise aloud.",
        "Look at the audience.",
        "End on time.",
    ),
}
