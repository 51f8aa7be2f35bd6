//! The output of the demo: a line for each step, and a progress bar on a terminal.

use std::io::{IsTerminal, Write};
use std::time::Instant;

use super::Result;

/// Width of the bar.
const BAR_WIDTH: usize = 24;

pub(super) struct Progress {
    terminal: bool,
    colour: bool,
    done: usize,
    steps: usize,
}

impl Progress {
    /// Creates the output for a number of steps.
    pub(super) fn new(steps: usize) -> Progress {
        let terminal = std::io::stdout().is_terminal();
        // no-color.org: set, and not empty.
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Progress {
            terminal,
            colour: terminal && !plain,
            done: 0,
            steps,
        }
    }

    /// Prints a separate line.
    pub(super) fn note(&self, text: &str) {
        self.clear();
        print(&format!("{text}\n"));
    }

    /// Runs a step, and prints its result and its duration.
    pub(super) async fn step(
        &mut self,
        subject: &str,
        doing: &str,
        work: impl Future<Output = Result<String>>,
    ) -> Result<()> {
        if self.terminal {
            self.clear();
            let (filled, empty) = self.bar();
            let (done, steps) = (self.done, self.steps);
            print(&format!(
                "[{filled}{empty}] {done}/{steps} {subject}: {doing}"
            ));
        }
        let begun = Instant::now();
        let ended = work.await;
        let seconds = begun.elapsed().as_secs_f64();
        self.done += 1;
        let (mark, text) = match &ended {
            Ok(text) => (self.paint("32", "ok  "), text.clone()),
            Err(failed) => (self.paint("31", "FAIL"), failed.to_string()),
        };
        self.note(&format!(
            "{mark} {subject:8} {doing:38} {seconds:6.2} s  {text}"
        ));
        ended.map(drop)
    }

    /// Reports a step that is skipped, and why.
    pub(super) fn skip(&mut self, subject: &str, doing: &str, why: &str) {
        self.done += 1;
        let mark = self.paint("33", "skip");
        self.note(&format!("{mark} {subject:8} {doing:38}           {why}"));
    }

    fn bar(&self) -> (String, String) {
        let filled = (self.done * BAR_WIDTH)
            .checked_div(self.steps)
            .unwrap_or(0)
            .min(BAR_WIDTH);
        ("=".repeat(filled), " ".repeat(BAR_WIDTH - filled))
    }

    fn paint(&self, colour: &str, text: &str) -> String {
        if self.colour {
            format!("\x1b[{colour}m{text}\x1b[0m")
        } else {
            text.to_string()
        }
    }

    fn clear(&self) {
        if self.terminal {
            print("\r\x1b[K");
        }
    }
}

/// A closed pipe must not keep the demo from cleaning up.
fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes());
    let _ = out.flush();
}
