//! Plots of lines and points on two logarithmic axes, as SVG.

use std::fmt::Write as _;
use std::path::Path;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
/// The margins of the plot: left of and below the axes, and above and right of them.
const LEFT: f64 = 64.0;
const RIGHT: f64 = 200.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 52.0;
/// Distinguishable also for readers with red-green color blindness.
const COLORS: [&str; 6] = [
    "#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73", "#666666",
];

/// A line: its name, and for each x the lower quartile, the median and the upper quartile.
pub struct Line {
    pub name: String,
    pub points: Vec<(f64, [f64; 3])>,
}

pub struct Plot<'a> {
    pub title: &'a str,
    pub across: &'a str,
    pub up: &'a str,
    pub lines: Vec<Line>,
    /// Dashed lines, with their labels.
    pub bounds: Vec<(&'a str, f64)>,
}

/// From values to the points of the plot.
struct Scale {
    x: (f64, f64),
    y: (f64, f64),
}

impl Scale {
    fn at(&self, x: f64, y: f64) -> (f64, f64) {
        let part = |value: f64, (low, high): (f64, f64)| {
            (value.log10() - low.log10()) / (high.log10() - low.log10())
        };
        (
            LEFT + part(x, self.x) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - part(y.max(self.y.0), self.y) * (HEIGHT - TOP - BOTTOM),
        )
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

/// A short form of a value: 1000 is 1k.
fn short(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{}M", v / 1e6),
        v if v >= 1e3 => format!("{}k", v / 1e3),
        v => format!("{v}"),
    }
}

impl Plot<'_> {
    pub fn save(&self, path: &Path) {
        std::fs::write(path, self.svg()).expect("a picture");
        println!("{}", path.display());
    }

    fn scale(&self) -> Scale {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let least = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::MAX, f64::min);
        let most = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::MIN, f64::max);
        let x = |point: &(f64, [f64; 3])| point.0;
        let low = least(&mut points().map(|point| point.1[0])).max(0.1);
        let high = most(&mut points().map(|point| point.1[2])).max(low * 10.0);
        Scale {
            x: (least(&mut points().map(x)), most(&mut points().map(x))),
            y: (
                10f64.powf(low.log10().floor()),
                10f64.powf(high.log10().ceil()),
            ),
        }
    }

    fn svg(&self) -> String {
        let scale = self.scale();
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
             viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
             <title>{0}</title>\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n\
             <text x=\"{LEFT}\" y=\"22\" font-size=\"15\">{0}</text>\n",
            escaped(self.title)
        );
        self.axes(&scale, &mut out).expect("a String accepts it");
        for (n, line) in self.lines.iter().enumerate() {
            draw(line, n, &scale, &mut out).expect("a String accepts it");
        }
        out.push_str("</svg>\n");
        out
    }

    fn axes(&self, scale: &Scale, out: &mut String) -> std::fmt::Result {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let mut decade = scale.y.0;
        while decade <= scale.y.1 * 1.01 {
            let (_, y) = scale.at(scale.x.0, decade);
            writeln!(
                out,
                "<path d=\"M{LEFT} {y:.1}H{right}\" stroke=\"#ddd\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                y + 4.0,
                short(decade)
            )?;
            decade *= 10.0;
        }
        let mut all: Vec<f64> = Vec::new();
        for (x, _) in self.lines.iter().flat_map(|line| &line.points) {
            if !all.contains(x) {
                all.push(*x);
            }
        }
        for value in all {
            let (x, _) = scale.at(value, scale.y.0);
            writeln!(
                out,
                "<path d=\"M{x:.1} {TOP}V{bottom}\" stroke=\"#eee\"/>\
                 <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                bottom + 18.0,
                short(value)
            )?;
        }
        for (name, bound) in &self.bounds {
            let (_, y) = scale.at(scale.x.0, *bound);
            writeln!(
                out,
                "<path d=\"M{LEFT} {y:.1}H{right}\" stroke=\"#000\" stroke-dasharray=\"4 4\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" font-size=\"11\">{}</text>",
                LEFT + 4.0,
                y - 4.0,
                escaped(name)
            )?;
        }
        writeln!(
            out,
            "<path d=\"M{LEFT} {TOP}V{bottom}H{right}\" fill=\"none\" stroke=\"#000\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n\
             <text transform=\"translate(16 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            f64::midpoint(LEFT, right),
            HEIGHT - 12.0,
            escaped(self.across),
            f64::midpoint(TOP, bottom),
            escaped(self.up)
        )
    }
}

fn draw(line: &Line, n: usize, scale: &Scale, out: &mut String) -> std::fmt::Result {
    let color = COLORS[n % COLORS.len()];
    let mut path = String::new();
    for (x, [low, middle, high]) in &line.points {
        let (at, y) = scale.at(*x, *middle);
        let (_, bottom) = scale.at(*x, *low);
        let (_, top) = scale.at(*x, *high);
        let word = if path.is_empty() { 'M' } else { 'L' };
        write!(path, "{word}{at:.1} {y:.1}")?;
        writeln!(
            out,
            "<path d=\"M{at:.1} {bottom:.1}V{top:.1}\" stroke=\"{color}\"/>\
             <circle cx=\"{at:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{color}\"/>"
        )?;
    }
    let (x, y) = (WIDTH - RIGHT + 12.0, TOP + 12.0 + 34.0 * n as f64);
    writeln!(
        out,
        "<path d=\"{path}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"/>\
         <path d=\"M{x} {y}h18\" stroke=\"{color}\" stroke-width=\"2\"/>"
    )?;
    for (at, words) in line.name.split('|').enumerate() {
        writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" font-size=\"11\">{}</text>",
            x + 24.0,
            y + 4.0 + 13.0 * at as f64,
            escaped(words.trim())
        )?;
    }
    Ok(())
}
