"""Names that try to break out of a page: for the report's tests, with a browser and without."""

HOSTILE = [
    "<script>window.pwned=1;alert(1)</script>", "<img src=x onerror=alert(1)>", "<img src=https://evil.test/a.png>", "</style><h1>broken",
    "</title><script>alert(2)</script>", '"><svg onload=alert(3)>', "' onmouseover='alert(4)", '" style="position:fixed;inset:0',
    "javascript:alert(5)", "<a href=https://evil.test>click</a>", "<iframe src=https://evil.test></iframe>",
    "<meta http-equiv=refresh content=0;url=//evil.test>", "<link rel=stylesheet href=//evil.test>", "<base href=//evil.test>",
    "<form action=//evil.test><input name=q>", "<!--", "-->", "]]>", "{{ 7*7 }}", "{% for x in y %}", "${7*7}", "&lt;b&gt;&#60;script&#62;",
    "x" * 500, "w x " * 200, "\u05e9\u05dc\u05d5\u05dd\u202egpj.exe\u202c", "\u2066\u2067z\u200e", "Z" + "\u0335\u0321\u031b" * 60,
    "line\nbreak\ttab\x00\x07\x1b[31mred", "\ud83d\ufffe\ufeff", "\ufdfa\ufdfd" * 40,
]  # fmt: skip
