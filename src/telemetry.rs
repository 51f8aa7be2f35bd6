//! Logs on stderr, and metrics and readiness over HTTP.
//!
//! Logs go to stderr only: stdout belongs to commands, and CSI allows no other place. Nothing here
//! ever contains a secret: a request is printed by its own redacting `Debug`.

mod cuts;
pub mod http;
pub mod metrics;
pub mod page;
pub mod populations;
pub mod router;
pub mod volumes;

use std::fmt;
use std::str::FromStr;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

pub use metrics::Metrics;

/// The value of `--log-format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// Readable text.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

impl LogFormat {
    /// Both names.
    pub const NAMES: [&'static str; 2] = ["text", "json"];
}

impl FromStr for LogFormat {
    type Err = UnknownFormat;
    fn from_str(text: &str) -> Result<LogFormat, UnknownFormat> {
        match text {
            "text" => Ok(LogFormat::Text),
            "json" => Ok(LogFormat::Json),
            _ => Err(UnknownFormat(text.to_string())),
        }
    }
}

/// A value that is neither of the two names.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a log format; give text or json")]
pub struct UnknownFormat(String);

/// Why logging could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// The filter cannot be parsed.
    #[error("log filter {filter:?}: {problem}")]
    Filter {
        filter: String,
        /// What is wrong.
        problem: String,
    },
    /// Logging was already set up.
    #[error("logging is already initialized")]
    Again,
}

/// The default filter: one line per call, and the results of the start.
pub const DEFAULT_FILTER: &str = "info";

/// Sends logs to stderr from now on. `filter` has the syntax of `RUST_LOG` and overrides it;
/// without either, [`DEFAULT_FILTER`] applies.
pub fn init(format: LogFormat, filter: Option<&str>) -> Result<(), InitError> {
    let from_env = std::env::var(EnvFilter::DEFAULT_ENV).ok();
    let filter = filter
        .or(from_env.as_deref())
        .filter(|text| !text.trim().is_empty())
        .unwrap_or(DEFAULT_FILTER);
    let subscriber = subscriber(format, filter, std::io::stderr)?;
    tracing::subscriber::set_global_default(subscriber).map_err(|_| InitError::Again)
}

/// The subscriber of [`init`], with another destination.
pub fn subscriber<W>(
    format: LogFormat,
    filter: &str,
    writer: W,
) -> Result<impl tracing::Subscriber + Send + Sync, InitError>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let parsed = EnvFilter::try_new(filter).map_err(|error| InitError::Filter {
        filter: filter.to_string(),
        problem: error.to_string(),
    })?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(parsed)
        .with_writer(writer)
        .with_ansi(false);
    let subscriber: Box<dyn tracing::Subscriber + Send + Sync> = match format {
        LogFormat::Text => Box::new(builder.finish()),
        LogFormat::Json => Box::new(
            builder
                .json()
                .flatten_event(true)
                .with_span_list(false)
                .finish(),
        ),
    };
    Ok(subscriber)
}

impl fmt::Display for LogFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_formats_print_and_parse_as_inverses() {
        for name in LogFormat::NAMES {
            assert_eq!(name.parse::<LogFormat>().unwrap().to_string(), name);
        }
        assert!("xml".parse::<LogFormat>().is_err());
    }

    #[test]
    fn a_filter_that_means_nothing_is_refused() {
        let error = subscriber(LogFormat::Text, "slackwater=loud", std::io::sink)
            .err()
            .unwrap();
        assert!(error.to_string().contains("slackwater=loud"), "{error}");
    }
}
