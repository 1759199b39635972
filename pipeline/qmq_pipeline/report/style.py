"""How the page looks, in light and in dark mode."""

from typing import Final

STYLE: Final = """
:root { --ink: #1c2128; --soft: #57606a; --paper: #ffffff; --card: #f6f8fa; --edge: #d0d7de;
--good: #1a7f37; --bad: #b42318; --open: #8a5a00; --link: #0a58b5;
--c1: #1f5fa8; --c2: #b35900; --c3: #1a7f37; --c4: #8250df; --c5: #b42318; --c6: #0b7285; --c7: #6b5b00;
--c8: #ad3a8a }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9ba5b0; --paper: #0d1117;
--card: #161b22; --edge: #30363d; --good: #56d364; --bad: #ff8b81; --open: #e3b341; --link: #79b8ff;
--c1: #6cb0f5; --c2: #f0a45d; --c3: #6bd285; --c4: #c3a6ff; --c5: #ff8b81; --c6: #5cc8d7; --c7: #d9c65a;
--c8: #f08fd0 } }
* { box-sizing: border-box }
html { scroll-behavior: smooth }
body { margin: 0; font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper) }
header, main, footer { max-width: 1040px; margin: 0 auto; padding: 0 20px }
header { padding-top: 28px }
h1 { font-size: 26px; margin: 0 } h2 { font-size: 20px; margin: 36px 0 8px; padding-top: 12px;
border-top: 1px solid var(--edge) } h3 { font-size: 15px; margin: 20px 0 6px }
h3 small { font-weight: 400; color: var(--soft) }
a { color: var(--link) } code { font: 13px ui-monospace, monospace }
.note, footer, .none { color: var(--soft) } .none { font-style: italic }
footer { padding-top: 24px; padding-bottom: 40px; font-size: 13px }
nav { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 18px 0 0 }
.verdict { border-left: 5px solid; padding: 10px 14px; background: var(--card); border-radius: 4px }
.good { border-color: var(--good) } .bad { border-color: var(--bad) } .open { border-color: var(--open) }
.good strong { color: var(--good) } .bad strong { color: var(--bad) } .open strong { color: var(--open) }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 10px; margin: 0 }
.tiles div { background: var(--card); border: 1px solid var(--edge); border-radius: 6px; padding: 8px 12px }
.tiles dt { color: var(--soft); font-size: 13px } .tiles dd { margin: 0; font-size: 21px;
font-variant-numeric: tabular-nums }
.wide { overflow-x: auto } .wide:focus-visible { outline: 2px solid var(--link) }
table { border-collapse: collapse; width: 100%; font-size: 13.5px }
th, td { text-align: left; padding: 5px 10px; border-bottom: 1px solid var(--edge); white-space: nowrap;
max-width: 420px; overflow: hidden; text-overflow: ellipsis }
th { color: var(--soft); font-weight: 600 } td.id { font: 13px ui-monospace, monospace }
td.id i { font-size: 0 } td.id i::before { content: "…"; font-size: 13px } td.t { white-space: normal; min-width: 260px; overflow-wrap: anywhere }
.n { text-align: right; font-variant-numeric: tabular-nums }
svg { width: 100%; height: auto; display: block } svg text { font: 12px system-ui, sans-serif; fill: var(--ink) }
svg text.note { fill: var(--soft) } .grid { stroke: var(--edge) } .hit { fill: transparent }
.outage { fill: var(--bad); fill-opacity: .18 } .hit:hover { fill: var(--edge); fill-opacity: .45 } .bar { fill: var(--c1) }
.line { fill: none; stroke-width: 2; stroke-linejoin: round } .dot { stroke: none }
.line.s1 { stroke: var(--c1) } .line.s2 { stroke: var(--c2); stroke-dasharray: 7 3 }
.line.s3 { stroke: var(--c3); stroke-dasharray: 2 3 } .line.s4 { stroke: var(--c4); stroke-dasharray: 9 3 2 3 }
.line.s5 { stroke: var(--c5) } .line.s6 { stroke: var(--c6); stroke-dasharray: 7 3 }
.line.s7 { stroke: var(--c7); stroke-dasharray: 2 3 } .line.s8 { stroke: var(--c8); stroke-dasharray: 9 3 2 3 }
.dot.s1 { fill: var(--c1) } .dot.s2 { fill: var(--c2) } .dot.s3 { fill: var(--c3) } .dot.s4 { fill: var(--c4) }
.dot.s5 { fill: var(--c5) } .dot.s6 { fill: var(--c6) } .dot.s7 { fill: var(--c7) } .dot.s8 { fill: var(--c8) }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; list-style: none; margin: 0 0 4px; padding: 0;
font-size: 13px } .legend svg { display: inline-block; width: 26px; height: 8px; margin-right: 6px;
vertical-align: middle }
@media (max-width: 640px) { .wide > svg { min-width: 600px } }
.verdict a { white-space: nowrap }
@media print { nav { display: none } section { break-inside: avoid } }
"""
