//! Times of pairs, as medians and quartiles, and the lines in which they are printed.

#![allow(dead_code, reason = "each benchmark uses a part of this module")]

use std::path::Path;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use slackwater_testkit::run;

/// The lower quartile, the median and the upper quartile.
#[derive(Clone, Copy)]
pub struct Spread {
    pub low: f64,
    pub middle: f64,
    pub high: f64,
}

impl Spread {
    pub fn of(values: impl IntoIterator<Item = f64>) -> Spread {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        assert!(!values.is_empty(), "something was measured");
        let at = |part: f64| {
            let place = part * (values.len() - 1) as f64;
            let (below, above) = (
                values[place.floor() as usize],
                values[place.ceil() as usize],
            );
            below + (above - below) * place.fract()
        };
        Spread {
            low: at(0.25),
            middle: at(0.5),
            high: at(0.75),
        }
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.2} ({:.2}-{:.2})", self.middle, self.low, self.high)
    }
}

/// Two ways to do the same, measured in turns.
#[derive(Default)]
pub struct Pairs {
    pub ours: Vec<f64>,
    pub hand: Vec<f64>,
}

impl Pairs {
    pub fn add(&mut self, ours: f64, hand: f64) {
        self.ours.push(ours);
        self.hand.push(hand);
    }

    /// The quotient of each pair.
    pub fn ratio(&self) -> Spread {
        Spread::of(self.both().map(|(ours, hand)| ours / hand))
    }

    /// The quotient of the undisturbed times: of the fastest tenth of each, the slowest.
    pub fn undisturbed(&self) -> f64 {
        let fast = |values: &[f64]| {
            let mut values = values.to_vec();
            values.sort_by(f64::total_cmp);
            values[values.len().div_ceil(10) - 1]
        };
        fast(&self.ours) / fast(&self.hand)
    }

    /// The difference of each pair.
    pub fn more(&self) -> Spread {
        Spread::of(self.both().map(|(ours, hand)| ours - hand))
    }

    fn both(&self) -> impl Iterator<Item = (f64, f64)> {
        assert_eq!(self.ours.len(), self.hand.len(), "both are measured");
        self.ours.iter().copied().zip(self.hand.iter().copied())
    }
}

/// Runs the work. Returns its result, and its duration in milliseconds.
pub fn timed<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let start = Instant::now();
    let result = work();
    (result, start.elapsed().as_secs_f64() * 1e3)
}

/// Seconds of processor time that a process has used; its PID, or "self".
pub fn cpu(pid: &str) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process");
    let (_, fields) = stat.rsplit_once(") ").expect("its name");
    let ticks = |at: usize| -> f64 {
        let field = fields.split(' ').nth(at).expect("a field");
        field.parse().expect("a number")
    };
    // utime and stime, in hundredths of a second on every Linux.
    (ticks(11) + ticks(12)) / 100.0
}

/// Writes random data to the beginning of a file or device, durably.
pub fn fill(path: &Path, bytes: u64) {
    let (to, count) = (format!("of={}", path.display()), bytes >> 20);
    let count = format!("count={count}");
    let words = [
        "if=/dev/urandom",
        &to,
        "bs=1M",
        &count,
        "conv=notrunc,fsync",
        "status=none",
    ];
    run("dd", &words);
}

/// Nanoseconds since 1970.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    u64::try_from(since.expect("after 1970").as_nanos()).expect("before 2554")
}

/// A number from the environment, for a shorter or longer run.
pub fn given(name: &str, usual: usize) -> usize {
    match std::env::var(name) {
        Ok(text) => text.parse().expect("a number"),
        Err(_) => usual,
    }
}
