"""The jinja2 template and the style sheets of the HTML report. Autoescape is on everywhere."""

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
.gradguard summary { font-weight: 600; cursor: pointer; }
.gradguard details.evidence { border-top: 1px solid var(--line); padding-top: .7em; }
.gradguard .scroll { overflow-x: auto; margin: .5em 0; }
.gradguard .said { opacity: .75; }
.gradguard svg { display: block; }
.gradguard svg text { font: 12.5px system-ui, sans-serif; fill: currentColor; }
.gradguard svg .right { text-anchor: end; }
.gradguard svg .middle { text-anchor: middle; }
.gradguard svg .where, .gradguard svg .code, .gradguard svg .op.right { font: 11px ui-monospace, Menlo, Consolas, monospace; }
.gradguard svg .axis { opacity: .65; font-size: 11.5px; }
.gradguard svg .bad { fill: var(--red); font-weight: 600; font-size: 11.5px; }
.gradguard .graph .op { font-weight: 600; }
.gradguard .graph .where { opacity: .7; }
.gradguard .graph rect { fill: var(--box); stroke: var(--line); stroke-width: 1.2; }
.gradguard .graph .root rect { stroke: currentColor; stroke-width: 1.6; }
.gradguard .graph .written rect, .gradguard .graph .culprit rect { fill: var(--red-box); stroke: var(--red); stroke-width: 1.8; }
.gradguard .graph .cut rect { fill: var(--red-box); stroke: var(--red); stroke-width: 1.8; stroke-dasharray: 5 3; }
.gradguard .graph .named rect { fill: var(--blue-box); stroke: var(--blue); }
.gradguard .graph .freed rect, .gradguard .graph .detached rect { fill: var(--soft); stroke-dasharray: 3 3; }
.gradguard .graph .freed text, .gradguard .graph .detached text { opacity: .55; }
.gradguard .graph .note { font-size: 11.5px; font-style: italic; }
.gradguard .graph .written .note, .gradguard .graph .culprit .note, .gradguard .graph .cut .note { fill: var(--red); }
.gradguard .graph .named .note { fill: var(--blue); }
.gradguard .edge { fill: none; stroke: currentColor; stroke-opacity: .45; stroke-width: 1.3; }
.gradguard .edge.grey { stroke-opacity: .25; stroke-dasharray: 3 3; }
.gradguard .edge.broken, .gradguard .cross { fill: none; stroke: var(--red); stroke-opacity: 1; stroke-width: 2; }
.gradguard .edge.broken { stroke-dasharray: 6 4; }
.gradguard marker.arrow path { fill: currentColor; fill-opacity: .55; }
.gradguard marker.broken path { fill: var(--red); }
.gradguard .norm { fill: var(--blue); }
.gradguard .nan { fill: var(--red); background: var(--red); }
.gradguard .zero { fill: none; stroke: var(--amber); stroke-width: 1.2; }
.gradguard .lane { stroke: var(--line); }
.gradguard .step { stroke: var(--line); stroke-dasharray: 2 3; }
.gradguard .way { fill: none; stroke: currentColor; stroke-opacity: .25; stroke-width: 1.5; }
.gradguard .event circle { fill: var(--blue); }
.gradguard .event.unknown circle { fill: var(--box); stroke: var(--blue); stroke-dasharray: 2 2; }
.gradguard .event.noticed circle { fill: var(--amber); }
.gradguard .event.culprit circle { fill: var(--red); }
.gradguard .event path { stroke: #fff; stroke-width: 2; fill: none; }
.gradguard .legend { display: flex; flex-wrap: wrap; gap: .2em 1.4em; font-size: 12.5px; opacity: .9; margin: .3em 0 .6em; }
.gradguard .key {
  display: inline-block; width: .95em; height: .95em; margin-right: .45em; vertical-align: -.12em; border-radius: 3px;
  border: 1.5px solid var(--line); box-sizing: border-box;
}
.gradguard .key.root { border-color: currentColor; }
.gradguard .key.written, .gradguard .key.culprit { background: var(--red-box); border-color: var(--red); }
.gradguard .key.cut { background: var(--red-box); border: 1.5px dashed var(--red); }
.gradguard .key.named { background: var(--blue-box); border-color: var(--blue); }
.gradguard .key.freed, .gradguard .key.detached { background: var(--soft); border-style: dashed; }
.gradguard .key.fold { box-shadow: 2px 2px 0 var(--line); }
.gradguard .key.nan { background: var(--red); border-color: var(--red); }
.gradguard .key.zero { border-color: var(--amber); }
.gradguard .key.event { border-radius: 50%; border: 0; }
.gradguard .key.event.noticed { background: var(--amber); }
.gradguard .key.event.culprit { background: var(--red); }
.gradguard table { border-collapse: collapse; font-size: 12.5px; }
.gradguard th, .gradguard td { text-align: left; padding: .2em .8em .2em 0; border-bottom: 1px solid var(--line); vertical-align: top; white-space: nowrap; }
.gradguard th { font-weight: 600; opacity: .75; }
.gradguard td.said { white-space: normal; min-width: 12em; }
.gradguard tr.culprit td, .gradguard tr.written td, .gradguard tr.cut td { background: var(--red-box); }
.gradguard tr.named td { background: var(--blue-box); }
.gradguard tr.freed td, .gradguard tr.detached td { opacity: .6; }
.gradguard td code { background: none; padding: 0; }
"""

_PAGE_STYLE = """
:root { color-scheme: light dark; }
body { margin: 2em auto; max-width: 74em; padding: 0 1.2em; font: 14px/1.5 system-ui, sans-serif; background: #fff; color: #1b1f24; }
h1 { font-size: 1.4em; }
nav a { color: inherit; }
.gradguard { --box: #fff; }
@media (max-width: 40em) { body { margin: 1em auto; padding: 0 .5em; } .gradguard { padding: .7em .7em; } .gradguard dl { display: block; } .gradguard dt { margin-top: .6em; } }
@media (prefers-color-scheme: dark) {
  body { background: #14171c; color: #e2e6ea; }
  .gradguard { --red: #ff7b72; --blue: #79b8ff; --green: #7ee787; --amber: #e3b341; --box: #1b1f26; --red-box: rgba(255,123,114,.16); --blue-box: rgba(121,184,255,.14); }
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

{% macro steps(part) -%}
  <div class="scroll"><table>
  <tr><th>line</th><th>expression</th><th>op</th><th>result</th><th>module</th><th>shape</th><th>dtype</th><th>requires_grad</th>
  <th>version</th><th></th></tr>
  {% for node in part.nodes %}
  <tr class="{{ node.mark }}"><td>{{ place_of(node) or '–' }}</td>
  <td>{% if node.count > 1 %}{{ node.count }} operations, folded{% else %}<code>{{ one_line(node.text or '–')[:90] }}</code>{% endif %}</td>
  <td>{{ node.op }}</td><td>{% if node.name %}<code>{{ one_line(node.name) }}</code>{% endif %}</td><td>{{ one_line(node.module or '') }}</td>
  <td>{% if node.shape is not none %}[{{ node.shape | join(', ') }}]{% endif %}</td><td>{{ node.dtype or '' }}</td>
  <td>{{ '' if node.requires_grad is none else node.requires_grad }}</td><td>{{ '' if node.version is none else node.version }}</td>
  <td class="said">{{ prose(one_line(node.note)) }}</td></tr>
  {% endfor %}
  </table></div>
{%- endmacro %}

{% macro evidence(e) -%}
  {% if e.graph %}
  <details open class="evidence"><summary>The graph between the loss and the culprit</summary>
  {% if not e.traced %}
  <p class="said">The step was not traced, so lines and expressions are not known. They are with <code>trace: {mode: always}</code>, as level
  strict has it.</p>
  {% endif %}
  <div class="scroll">{{ graph_picture(e.graph) }}</div></details>
  {% endif %}
  {% if e.steps and e.steps.nodes %}
  <details {{ 'open ' if e.steps.nodes | length <= 30 }}class="evidence"><summary>Each step from the input to the loss</summary>
  {{ steps(e.steps) }}
  </details>
  {% endif %}
  {% if e.norms %}
  <details open class="evidence"><summary>Gradient norm by layer</summary>
  <p class="said">Recorded at each of an optimizer's first 16 steps, then at one in 16.</p>
  <div class="scroll">{{ norms_picture(e.norms) }}</div></details>
  {% endif %}
  {% if e.timeline %}
  <details open class="evidence"><summary>What happened before</summary>
  <div class="scroll">{{ timeline_picture(e.timeline) }}</div></details>
  {% endif %}
  {% if e.gradless %}
  <details {{ 'open ' if e.gradless | length <= 12 }}class="evidence"><summary>Parameters without a gradient of this loss ({{ e.gradless_total }})</summary>
  <div class="scroll"><table><tr><th>parameter</th><th>shape</th><th>why</th></tr>
  {% for each in e.gradless %}
  <tr><td><code>{{ one_line(each.name) }}</code></td><td>[{{ each.shape | join(', ') }}]</td><td>{{ each.why }}</td></tr>
  {% endfor %}
  </table></div>
  {% if e.gradless_total > e.gradless | length %}
  <p class="said">and {{ e.gradless_total - e.gradless | length }} more</p>
  {% endif %}
  </details>
  {% endif %}
  {% for lost in e.lost %}
  <p class="said">gradguard failed to gather {{ lost }}; its log says why.</p>
  {% endfor %}
{%- endmacro %}

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

TEMPLATE = _MACROS + _PAGE.replace("%PAGE_STYLE%", _PAGE_STYLE).replace("%STYLE%", _STYLE)
