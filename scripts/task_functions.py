"""The functions that the built-in model was taught to write. See `mstar.scripts.tasks`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Function:
    """A Python function: what it does as a question says it, and its source."""

    does: str
    name: str
    arguments: str
    documentation: str
    body: str

    @property
    def source(self) -> str:
        """The function as the model writes it."""
        return f'def {self.name}({self.arguments}):\n    """{self.documentation}"""\n{self.body}'


FUNCTIONS = (
    Function(
        "merges two sorted lists",
        "merge_sorted",
        "a, b",
        "Merge two sorted lists into one sorted list.",
        "    result = []\n"
        "    i = j = 0\n"
        "    while i < len(a) and j < len(b):\n"
        "        if a[i] <= b[j]:\n"
        "            result.append(a[i])\n"
        "            i += 1\n"
        "        else:\n"
        "            result.append(b[j])\n"
        "            j += 1\n"
        "    return result + a[i:] + b[j:]",
    ),
    Function(
        "reverses a string",
        "reverse_string",
        "text",
        "Return the text reversed.",
        "    return text[::-1]",
    ),
    Function(
        "checks whether a number is prime",
        "is_prime",
        "n",
        "Return True if n is prime.",
        "    if n < 2:\n"
        "        return False\n"
        "    for d in range(2, int(n ** 0.5) + 1):\n"
        "        if n % d == 0:\n"
        "            return False\n"
        "    return True",
    ),
    Function(
        "computes the factorial of n",
        "factorial",
        "n",
        "Return n factorial.",
        "    result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result",
    ),
    Function(
        "returns the nth Fibonacci number",
        "fibonacci",
        "n",
        "Return the nth Fibonacci number.",
        "    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
    ),
    Function(
        "counts the words in a text",
        "count_words",
        "text",
        "Count how often each word occurs.",
        "    counts = {}\n"
        "    for word in text.split():\n"
        "        counts[word] = counts.get(word, 0) + 1\n"
        "    return counts",
    ),
    Function(
        "finds the largest item of a list",
        "largest",
        "items",
        "Return the largest item.",
        "    best = items[0]\n"
        "    for item in items[1:]:\n"
        "        if item > best:\n"
        "            best = item\n"
        "    return best",
    ),
    Function(
        "removes duplicates from a list",
        "unique",
        "items",
        "Remove duplicates and keep the order.",
        "    seen = set()\n"
        "    result = []\n"
        "    for item in items:\n"
        "        if item not in seen:\n"
        "            seen.add(item)\n"
        "            result.append(item)\n"
        "    return result",
    ),
    Function(
        "checks whether a text is a palindrome",
        "is_palindrome",
        "text",
        "Return True if the text reads the same backwards.",
        "    cleaned = [c.lower() for c in text if c.isalnum()]\n    return cleaned == cleaned[::-1]",
    ),
    Function(
        "computes the greatest common divisor",
        "gcd",
        "a, b",
        "Return the greatest common divisor of a and b.",
        "    while b:\n        a, b = b, a % b\n    return a",
    ),
    Function(
        "flattens a nested list",
        "flatten",
        "items",
        "Flatten a nested list.",
        "    result = []\n"
        "    for item in items:\n"
        "        if isinstance(item, list):\n"
        "            result.extend(flatten(item))\n"
        "        else:\n"
        "            result.append(item)\n"
        "    return result",
    ),
    Function(
        "runs a binary search",
        "binary_search",
        "items, target",
        "Return the index of target, or -1.",
        "    low, high = 0, len(items) - 1\n"
        "    while low <= high:\n"
        "        middle = (low + high) // 2\n"
        "        if items[middle] == target:\n"
        "            return middle\n"
        "        if items[middle] < target:\n"
        "            low = middle + 1\n"
        "        else:\n"
        "            high = middle - 1\n"
        "    return -1",
    ),
    Function(
        "sorts a list with insertion sort",
        "insertion_sort",
        "items",
        "Sort items in place.",
        "    for i in range(1, len(items)):\n"
        "        item = items[i]\n"
        "        j = i - 1\n"
        "        while j >= 0 and items[j] > item:\n"
        "            items[j + 1] = items[j]\n"
        "            j -= 1\n"
        "        items[j + 1] = item\n"
        "    return items",
    ),
    Function(
        "reads a file and returns its lines",
        "read_lines",
        "path",
        "Return the lines of a text file.",
        '    with open(path, encoding="utf-8") as file:\n'
        '        return [line.rstrip("\\n") for line in file]',
    ),
    Function(
        "converts Celsius to Fahrenheit",
        "to_fahrenheit",
        "celsius",
        "Convert a temperature to Fahrenheit.",
        "    return celsius * 9 / 5 + 32",
    ),
    Function(
        "computes the mean of a list",
        "mean",
        "values",
        "Return the arithmetic mean.",
        "    return sum(values) / len(values)",
    ),
    Function(
        "splits a list into chunks",
        "chunks",
        "items, size",
        "Split items into lists of at most size items.",
        "    return [items[i:i + size] for i in range(0, len(items), size)]",
    ),
    Function(
        "transposes a matrix",
        "transpose",
        "matrix",
        "Return the transposed matrix.",
        "    return [list(row) for row in zip(*matrix)]",
    ),
    Function(
        "counts the vowels in a text",
        "count_vowels",
        "text",
        "Count the vowels.",
        '    return sum(1 for c in text.lower() if c in "aeiou")',
    ),
    Function(
        "validates balanced brackets",
        "balanced",
        "text",
        "Return True if all brackets match.",
        '    pairs = {")": "(", "]": "[", "}": "{"}\n'
        "    stack = []\n"
        "    for c in text:\n"
        '        if c in "([{":\n'
        "            stack.append(c)\n"
        "        elif c in pairs:\n"
        "            if not stack or stack.pop() != pairs[c]:\n"
        "                return False\n"
        "    return not stack",
    ),
)
