//! Which trials of a sweep run: of a test that tries every fault, or every false answer, in turn.

/// The selection that `SLACKWATER_SWEEP` requests.
pub struct Sweep {
    /// `full`: also trials that are left out by default.
    pub is_full: bool,
    /// The N of `N/M`: the number of the part that runs, counted from 0.
    pub n: usize,
    /// The M of `N/M`: the number of parts into which the trials that run by default are divided.
    pub of: usize,
}

impl Sweep {
    /// Reads the variable. Without it, all trials run that run by default.
    ///
    /// # Panics
    /// Panics if the variable has another value.
    pub fn requested() -> Sweep {
        let value = std::env::var("SLACKWATER_SWEEP").unwrap_or("0/1".into());
        let is_full = value == "full";
        let part = if is_full { "0/1" } else { &value };
        let part = part.split_once('/');
        let part = part.and_then(|(n, of)| n.parse().ok().zip(of.parse().ok()));
        let part = part.filter(|(n, of)| n < of);
        let (n, of) = part.expect("SLACKWATER_SWEEP is full, or N/M with N less than M");
        Sweep { is_full, n, of }
    }

    /// Those of `all` trials that run.
    pub fn part<T>(&self, all: impl Iterator<Item = T>) -> impl Iterator<Item = T> {
        all.skip(self.n).step_by(self.of)
    }

    /// Those of `all` trials that run where `make test` runs all of them, and `make quick` a part.
    pub fn part_if_quick<T>(&self, all: impl Iterator<Item = T>) -> impl Iterator<Item = T> {
        let of = if self.is_quick() { self.of } else { 1 };
        all.skip(self.n % of).step_by(of)
    }

    /// How many of `all` random trials run: in `make quick` as many as proptest runs by default.
    pub fn random(&self, all: u32) -> u32 {
        if self.is_quick() { all.min(256) } else { all }
    }

    /// Whether the parts are as small as those of `make quick`.
    fn is_quick(&self) -> bool {
        self.of >= 16
    }
}
