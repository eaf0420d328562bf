"""The style sheet and the macros of what the HTML report draws beside a diagnosis; parts of `gradguard.reporting.html.template`."""

STYLE = """
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
.gradguard .graph .freed .behind, .gradguard .graph .detached .behind { fill: none; }
.gradguard .graph .freed text, .gradguard .graph .detached text { opacity: .55; }
.gradguard .graph .note { font-size: 11.5px; font-style: italic; }
.gradguard .graph .written .note, .gradguard .graph .culprit .note, .gradguard .graph .cut .note { fill: var(--red); }
.gradguard .graph .named .note { fill: var(--blue); }
.gradguard .edge { fill: none; stroke: currentColor; stroke-opacity: .45; stroke-width: 1.3; }
.gradguard .edge.grey { stroke-opacity: .25; stroke-dasharray: 3 3; }
.gradguard .edge.broken, .gradguard .cross { fill: none; stroke: var(--red); stroke-opacity: 1; stroke-width: 2; }
.gradguard .edge.broken { stroke-dasharray: 6 4; }
.gradguard marker.arrow path { fill: currentColor; fill-opacity: .55; }
.gradguard marker { overflow: visible; }
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
.gradguard th, .gradguard td {
  text-align: left; padding: .2em .8em .2em 0; border-bottom: 1px solid var(--line); vertical-align: top; white-space: nowrap;
}
.gradguard th { font-weight: 600; opacity: .75; }
.gradguard td .note { font-size: 12px; white-space: normal; min-width: 14em; max-width: 28em; opacity: .85; }
.gradguard tr.culprit td, .gradguard tr.written td, .gradguard tr.cut td { background: var(--red-box); }
.gradguard tr.named td { background: var(--blue-box); }
.gradguard tr.freed td, .gradguard tr.detached td { opacity: .6; }
.gradguard td code { background: none; padding: 0; }
"""

MACROS = """
{% macro steps(part) -%}
  <div class="scroll"><table>
  <tr><th>line</th><th>expression</th><th>op</th><th>result</th><th>module</th><th>shape</th><th>dtype</th><th>requires_grad</th>
  <th>version</th></tr>
  {% for node in part.nodes %}
  <tr class="{{ node.mark }}"><td>{{ place_of(node) or '–' }}</td>
  <td>
  {%- if node.count > 1 %}{{ node.count }} operations, folded
  {%- else %}<code>{{ one_line(node.text or '–') | truncate(56, True, '…') }}</code>{% endif %}
  {% if node.note %}<div class="note">{{ prose(one_line(node.note)) }}</div>{% endif %}</td>
  <td>{{ node.op }}</td><td>{% if node.name %}<code>{{ one_line(node.name) }}</code>{% endif %}</td>
  <td>{{ one_line(node.module or '') }}</td>
  <td>{% if node.shape is not none %}[{{ node.shape | join(', ') }}]{% endif %}</td><td>{{ node.dtype or '' }}</td>
  <td>{{ '' if node.requires_grad is none else node.requires_grad }}</td><td>{{ '' if node.version is none else node.version }}</td></tr>
  {% endfor %}
  </table></div>
{%- endmacro %}

{% macro evidence(e) -%}
  {% if e.graph %}
  {% set marked = e.graph.nodes | rejectattr('mark', 'in', ['', 'root']) | list %}
  <details open class="evidence">
  <summary>{{ 'The graph between the loss and the culprit' if marked else 'The graph of the loss' }}</summary>
  {% if not e.lines_known %}
  <p class="said">The step was not traced, so lines and expressions are not known. They are with <code>trace: {mode: always}</code>, as
  level strict has it.</p>
  {% elif e.lines_of_step is not none %}
  <p class="said">The step was not traced. The lines are those of step {{ e.lines_of_step }}, which made the same operations in the same
  order.</p>
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
  <details {{ 'open ' if e.gradless | length <= 12 }}class="evidence">
  <summary>Parameters without a gradient of this loss ({{ e.gradless_total }})</summary>
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
"""
