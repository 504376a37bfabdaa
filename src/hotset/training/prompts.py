"""Beginnings from which a teacher generates its own training text.

Distillation only needs text on which the teacher's distribution is meaningful. The teacher's own text
suffices if the beginnings make it write about many topics in many ways. Each beginning is a pattern with a
topic inserted. There are some thousands of combinations, and sampling varies them further.
"""

from __future__ import annotations

import random

TOPICS = tuple(
    topic.strip()
    for topic in """
the Roman Empire; the French Revolution; the Silk Road; the Great Wall of China; the Ottoman Empire; Vikings;
the American Civil War; the First World War; the Second World War; the Cold War; the Industrial Revolution;
the Renaissance; ancient Egypt; the Aztec civilization; the Battle of Waterloo; the Royal Navy; medieval
castles; the city of London; Paris; Tokyo; New York City; Berlin; Cairo; Rio de Janeiro; Australia; Canada;
Ireland; Norway; the Pacific Ocean; the Sahara desert; the Amazon rainforest; the Himalayas; the Great Lakes;
Antarctica; Iceland; volcanoes; earthquakes; hurricanes; glaciers; rivers; coral reefs; climate change; the
water cycle; the Moon; Mars; Jupiter; black holes; galaxies; comets; the Sun; telescopes; space exploration;
satellites; gravity; magnetism; electricity; light; sound waves; quantum mechanics; relativity; atoms; the
periodic table; chemical reactions; acids; photosynthesis; cells; DNA; evolution; dinosaurs; whales; wolves;
bees; birds of prey; butterflies; oak trees; fungi; bacteria; viruses; vaccines; the human heart; the brain;
sleep; nutrition; exercise; mental health; medicine; surgery; algebra; prime numbers; probability; geometry;
statistics; algorithms; computers; the internet; artificial intelligence; programming in Python; databases;
cryptography; robots; smartphones; video games; bridges; railways; airplanes; ships; bicycles; cars; solar
power; wind turbines; nuclear energy; batteries; steel; paper; glass; textiles; printing; clocks; William
Shakespeare; Jane Austen; Leonardo da Vinci; Mozart; Albert Einstein; Isaac Newton; Marie Curie; Charles
Darwin; a famous painter; a science fiction novel; a poem about the sea; a short story; a television series;
a hit single; a rock band; jazz music; the violin; opera; a film director; a Hollywood film; theatre;
photography; architecture; football; tennis; the Olympic Games; chess; basketball; a college football season;
swimming; a marathon; cricket; bread; cheese; coffee; chocolate; rice; a vegetable soup; a healthy breakfast;
gardening; a small farm; wine; tea; money; banks; taxes; a small business; marketing; trade; inflation; the
stock market; insurance; a job interview; democracy; law; the United Nations; elections; human rights;
education; universities; libraries; museums; language; friendship; honesty; kindness; time management;
writing an email; learning a new language; a trip to the mountains; a road in Michigan; a highway; a
lighthouse; a warship; a tropical storm; a species of shark; a mushroom; a parish church; a village in
England; a river in Europe; a mountain pass; a naval battle; a general; a king; a queen; a saint; an emperor;
a singer and songwriter; an album; a music video; an episode of a cartoon; a role-playing game; a stamp; a
coin; a temple; a football player; a baseball pitcher; a wrestling event; a politician; a scientist; an
explorer; a physician; a poet
""".replace("\n", " ").split(";")
)

QUESTIONS = (
    "What is {}?",
    "Tell me about {}.",
    "Explain {} to a child.",
    "Write a short paragraph about {}.",
    "What are three interesting facts about {}?",
    "Give me a brief history of {}.",
    "Why is {} important?",
    "Write a short story that has to do with {}.",
    "I have to give a talk about {}. How should I begin?",
    "List five things that everyone should know about {}.",
    "What do people often get wrong about {}?",
    "Summarize what you know about {} in two sentences.",
    "Write a poem about {}.",
    "How has {} changed over time?",
    "Can you help me write an essay about {}?",
    "Compare {} with something similar.",
    "Who should learn about {}, and why?",
    "Write a dialogue between two friends about {}.",
    "What questions would an expert ask about {}?",
    "Describe {} in detail.",
    "What are the advantages and disadvantages of {}?",
    "Make a quiz about {} with answers.",
    "Write an encyclopedia article about {}.",
    "Write a news report about {}.",
    "What is the best way to study {}?",
)

PLAIN_QUESTIONS = (
    "Hello! How are you?",
    "What is the capital of France?",
    "What is 17 plus 25?",
    "Who are you?",
    "Tell me a joke.",
    "What can you help me with?",
    "Write a Python function that adds two numbers.",
    "What should I cook tonight?",
    "How do I make a cup of tea?",
    "Give me a tip for better sleep.",
    "Translate 'good morning' into French.",
    "Write a haiku.",
    "Name the planets of the solar system.",
    "What is the tallest mountain in the world?",
    "Write a thank-you note to my teacher.",
    "What is the difference between weather and climate?",
    "How many days are there in a year?",
    "Correct this sentence: she go to school every day.",
    "Give me a list of ten animals.",
    "Why is the sky blue?",
    "What rhymes with cat?",
    "How do airplanes fly?",
    "Write a Python function that reverses a string.",
    "What is the opposite of generous?",
    "Tell me a bedtime story.",
)

OPENINGS = (
    " = {0} = \n \n",
    "{0} is",
    "{0} was",
    "The history of {1}",
    "In the early years of {1} ,",
    "An article about {1}:\n\n",
    "{0}\n\n",
    "# {0}\n\n## Overview\n\n",
    "During the nineteenth century , {1}",
    "One of the most important facts about {1}",
    "The following is an introduction to {1}.\n\n",
    "Most people first hear of {1}",
    "According to historians , {1}",
    "A study of {1} by researchers",
    "Chapter 1: {0}\n\n",
    "In {1} ,",
    "The first mention of {1}",
    "Many books about {1}",
)


def question(random: random.Random) -> str:
    """Return a question that a person might ask."""
    if random.random() < 0.1:
        return random.choice(PLAIN_QUESTIONS)
    return random.choice(QUESTIONS).format(random.choice(TOPICS))


def opening(random: random.Random) -> str:
    """Return the beginning of an article."""
    topic = random.choice(TOPICS)
    return random.choice(OPENINGS).format(topic[:1].upper() + topic[1:], topic)
