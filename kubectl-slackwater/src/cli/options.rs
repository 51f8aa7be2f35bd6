//! Options that several commands have: how a change is made, whether its end is awaited, what is listed, and
//! the format of the output.

use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::cluster::{Cluster, Scope};
use crate::text::seconds;

/// How a change is made.
#[derive(Clone, Debug, Args)]
pub struct Change {
    /// Make the change; without it, only the plan is printed
    #[arg(long, short)]
    pub yes: bool,
    /// Let the API server check the change without storing it
    #[arg(long)]
    pub dry_run: bool,
}

impl Change {
    /// A change that the user has confirmed.
    pub const CONFIRMED: Change = Change {
        yes: true,
        dry_run: false,
    };
    /// A change that the API server checks and does not store.
    pub const DRY_RUN: Change = Change {
        yes: true,
        dry_run: true,
    };
}

/// Whether the end of an operation is awaited.
#[derive(Clone, Debug, Args)]
pub struct Wait {
    /// Print the progress, and end when the operation has ended
    #[arg(long)]
    pub wait: bool,
    /// Time after which the program ends (`90s`, `10m`, `2h`); the operation goes on
    #[arg(long, value_name = "TIME", value_parser = parse_time, requires = "wait")]
    pub timeout: Option<Duration>,
}

/// A number of seconds, minutes or hours.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    let seconds = seconds(text).filter(|_| !text.ends_with('d'));
    match seconds.and_then(|seconds| u64::try_from(seconds).ok()) {
        Some(seconds) => Ok(Duration::from_secs(seconds)),
        None => Err(format!("{text} is not a time such as 90s, 10m or 2h")),
    }
}

/// A duration as fields of objects have it.
pub fn parse_deadline(text: &str) -> Result<String, String> {
    match seconds(text) {
        Some(_) => Ok(text.to_string()),
        None => Err(format!("{text} is not a time such as 90s, 10m, 2h or 1d")),
    }
}

/// How a result is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Columns.
    #[default]
    Table,
    /// More columns.
    Wide,
    /// JSON.
    Json,
    /// YAML.
    Yaml,
    /// Kind and name, one a line.
    Name,
}

/// The format of the output.
#[derive(Clone, Debug, Args)]
pub struct Output {
    /// Format of the output
    #[arg(long = "output", short = 'o', value_enum, default_value_t)]
    pub format: Format,
}

/// What is listed, and how.
#[derive(Clone, Debug, Args)]
pub struct ListArguments {
    #[command(flatten)]
    pub output: Output,
    /// All namespaces
    #[arg(long, short = 'A')]
    pub all_namespaces: bool,
    /// Only objects with these labels (claims, for volumes)
    #[arg(long, short = 'l', value_name = "SELECTOR")]
    pub selector: Option<String>,
    /// No line with the names of columns
    #[arg(long)]
    pub no_headers: bool,
    /// Print lines that change, until interrupted
    #[arg(long, short)]
    pub watch: bool,
}

impl ListArguments {
    /// The namespaces that are listed.
    pub fn scope(&self, cluster: &Cluster) -> Scope {
        match self.all_namespaces {
            true => Scope::All,
            false => Scope::Namespace(cluster.namespace.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_unit() {
        assert_eq!(parse_time("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_time("2h"), Ok(Duration::from_secs(7200)));
        for wrong in ["", "5", "m", "-1s", "1.5h", "5d", "é"] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_deadline("2d").as_deref(), Ok("2d"));
        for wrong in ["", "5", "m", "-1s", "1.5h", "soon", "é"] {
            assert!(parse_deadline(wrong).is_err(), "{wrong}");
        }
    }
}
