"""The jinja2 template and the style sheets of the HTML report. Autoescape is on everywhere."""

from gradguard.reporting.html.evidence_template import MACROS, STYLE

# Greys with alpha and inherited text colour, so that a fragment sits in light and dark notebooks alike.
_STYLE = """
.gradguard {
  --red: #c62828; --blue: #1565c0; --green: #2e7d32; --amber: #9a6700; --line: rgba(128,128,128,.35); --soft: rgba(128,128,128,.1);
  --box: rgba(128,128,128,.06); --red-box: rgba(229,57,53,.13); --blue-box: rgba(33,120,220,.11);
  font: 14px/1.5 system-ui, sans-serif; border: 1px solid var(--line); border-left: 4px solid var(--red); border-radius: 6px;
  padding: .8em 1.1em; margin: 1em 0; max-width: 72em; text-align: left;
}
.gradguard.warning { border-left-color: var(--amber); }
.gradguard.info { border-left-color: var(--blue); }
.gradguard .title { font-size: 1.1em; font-weight: 600; overflow-wrap: anywhere; }
.gradguard.error .severity { color: var(--red); }
.gradguard.warning .severity { color: var(--amber); }
.gradguard.info .severity { color: var(--blue); }
.gradguard .place { margin: 1em 0 .2em; }
.gradguard .place b { color: var(--red); }
.gradguard pre, .gradguard code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 13px; color: inherit; }
.gradguard pre {
  background: var(--soft); padding: .5em .7em; margin: .2em 0; overflow-x: auto; white-space: pre; border-radius: 4px; tab-size: 4;
}
.gradguard p { margin: .2em 0; }
.gradguard dd > :first-child { margin-top: 0; }
.gradguard code { background: var(--soft); padding: 0 .2em; border-radius: 3px; }
.gradguard .number { opacity: .55; user-select: none; }
.gradguard mark { background: none; color: inherit; padding-bottom: 2px; border-bottom: 2px solid var(--blue); }
.gradguard mark.culprit { background: rgba(229,57,53,.18); border-bottom-color: var(--red); }
.gradguard .label.related { color: var(--blue); }
.gradguard .label.culprit { color: var(--red); font-weight: 600; }
.gradguard .added { color: var(--green); }
.gradguard .removed { color: var(--red); }
.gradguard dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .35em 1em; margin: 1em 0 0; }
.gradguard dt { font-weight: 600; opacity: .75; }
.gradguard dd { margin: 0; }
.gradguard .safety { opacity: .7; }
.gradguard details { margin-top: .9em; }
.gradguard details pre { white-space: pre-wrap; overflow-wrap: anywhere; }
"""

_PAGE_STYLE = """
:root { color-scheme: light dark; }
body { margin: 2em auto; max-width: 74em; padding: 0 1.2em; font: 14px/1.5 system-ui, sans-serif; background: #fff; color: #1b1f24; }
h1 { font-size: 1.4em; }
nav a { color: inherit; }
.gradguard { --box: #fff; }
@media (max-width: 40em) {
  body { margin: 1em auto; padding: 0 .5em; }
  .gradguard { padding: .7em; }
  .gradguard dl { display: block; }
  .gradguard dt { margin-top: .6em; }
}
@media (prefers-color-scheme: dark) {
  body { background: #14171c; color: #e2e6ea; }
  .gradguard {
    --red: #ff7b72; --blue: #79b8ff; --green: #7ee787; --amber: #e3b341;
    --box: #1b1f26; --red-box: rgba(255,123,114,.16); --blue-box: rgba(121,184,255,.14);
  }
}
"""

_MACROS = """
{% macro prose(text) -%}
  {%- for piece, code in ticks(text) %}{% if code %}<code>{{ piece }}</code>{% else %}{{ piece }}{% endif %}{% endfor -%}
{%- endmacro %}

{% macro long(text) -%}
  {%- for part, code in paragraphs(text) %}{% if code %}<pre>{{ part }}</pre>{% else %}<p>{{ prose(part) }}</p>{% endif %}{% endfor -%}
{%- endmacro %}

{% macro patch(text) -%}
  {%- for change in read_patch(text) -%}
    <pre>{% if change.file %}<span class="number">{{ change.file }}</span>{{ newline }}{% endif -%}
    {%- for line in change.lines -%}
      <span class="number">{{ '%5s' % (line.number or ('' if line.sign else '…')) }}</span>{{ ' ' -}}
      <span class="{{ {'+': 'added', '-': 'removed'}.get(line.sign, 'same') }}">{{ line.sign }} {{ line.text }}</span>{{ newline -}}
    {%- endfor %}</pre>
  {%- else -%}
    <pre>{{ clean(text) }}</pre>
  {%- endfor -%}
{%- endmacro %}

{% macro source(block, confidence) -%}
  <div class="place">
    {%- if block.culprit %}<b>{{ wording.CULPRIT[confidence] }}</b> {% endif -%}
    <code>{{ block.place }}</code>
    {%- if block.function and block.function != '<module>' %} in <code>{{ one_line(block.function) }}</code>{% endif -%}
  </div>
  <pre>
  {%- for line in html_lines(block) -%}
    {%- if line.pieces -%}
      <span class="number">{{ '%5s' % (line.number or '') }} │ </span>
      {%- for piece in line.pieces -%}
        {%- if piece.style %}<mark class="{{ piece.style }}">{{ piece.text }}</mark>{% else %}{{ piece.text }}{% endif -%}
      {%- endfor -%}
      {{ newline -}}
    {%- endif -%}
    {%- for label in line.labels -%}
      <span class="number">      │ </span><span class="label {{ label.style }}">{{ label.text }}</span>{{ newline -}}
    {%- endfor -%}
  {%- endfor -%}
  </pre>
{%- endmacro %}

%EVIDENCE%

{% macro show(d, number) %}
<div class="gradguard {{ d.severity }}" id="gradguard-{{ number }}">
<div class="title"><span class="severity">{{ d.severity }}[{{ d.code }}]</span>: {{ prose(one_line(d.headline)) }}</div>
{% set blocks = build_blocks(d) %}
{% if d.culprit is none %}
<p>{{ wording.NO_CULPRIT }}{% if blocks %}; what is known:{% endif %}</p>
{% endif %}
{% for block in blocks %}
{{ source(block, d.confidence) }}
{% endfor %}
<dl>
{% if d.explanation.strip() %}
<dt>why</dt><dd>{{ long(d.explanation) }}</dd>
{% endif %}
{% if d.confidence != 'certain' %}
<dt>sure</dt><dd>{{ wording.CONFIDENCE[d.confidence] }}</dd>
{% endif %}
{% for fix in d.fixes %}
<dt>{{ 'fix' if loop.first else 'or' }}</dt>
<dd>{{ prose(wording.fix_title(fix)) }} <span class="safety">({{ wording.standing(fix) }})</span>
{% if fix.detail %}{{ long(fix.detail) }}{% endif %}
{% for further in fix.verified.behind %}{{ long('and behind it, ' + further) }}{% endfor %}
{% if fix.patch %}{{ patch(fix.verified.patch or fix.patch) }}{% endif %}
</dd>
{% endfor %}
{% for text in d.avoid %}
<dt>not</dt><dd>{{ long(text) }}</dd>
{% endfor %}
{% for text in d.notes %}
<dt>note</dt><dd>{{ long(text) }}</dd>
{% endfor %}
{% for name, facts in wording.tensor_rows(d.tensors, '→') %}
<dt>tensor</dt><dd><code>{{ name }}</code> {{ facts }}</dd>
{% endfor %}
{% if wording.when(d) %}
<dt>when</dt><dd>{{ wording.when(d) }}</dd>
{% endif %}
{% if d.breadcrumbs %}
<dt>before</dt><dd>{% for crumb in d.breadcrumbs %}<p>{{ prose(one_line(crumb)) }}</p>{% endfor %}</dd>
{% endif %}
{% if wording.repeats(d) %}
<dt>again</dt><dd>{{ wording.repeats(d) }}</dd>
{% endif %}
<dt>more</dt><dd><code>gradguard explain {{ d.code }}</code> ({{ d.name }})</dd>
</dl>
{% if d.evidence %}
{{ evidence(d.evidence) }}
{% endif %}
{% if d.torch_message %}
<details open class="evidence"><summary>PyTorch said</summary><pre>{{ clean(d.torch_message) }}</pre></details>
{% endif %}
</div>
{% endmacro %}
"""

_PAGE = """
{% if page %}
<!DOCTYPE html>
{{ mark | safe }}
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>%STYLE%%PAGE_STYLE%</style>
</head>
<body>
<h1>{{ title }}</h1>
{% if diagnoses | length > 1 %}
<nav><ol>
{% for d in diagnoses %}
<li><a href="#gradguard-{{ loop.index }}">{{ wording.headline(d) }}</a></li>
{% endfor %}
</ol></nav>
{% endif %}
{% for section in sections %}
{{ section | safe }}
{% else %}
<p>No diagnosis: nothing was found.</p>
{% endfor %}
{% if left_out %}
<p>{{ left_out }} more diagnoses are not shown.</p>
{% endif %}
</body>
</html>
{% else %}
<style>%STYLE%</style>
{% for section in sections %}
{{ section | safe }}
{% endfor %}
{% endif %}
"""

TEMPLATE = _MACROS.replace("%EVIDENCE%", MACROS) + _PAGE.replace("%PAGE_STYLE%", _PAGE_STYLE).replace("%STYLE%", _STYLE + STYLE)
