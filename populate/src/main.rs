//! The program: its configuration, its exit code and its termination message.

use std::fs::File;
use std::io::Write;
use std::process::ExitCode;

use slackwater_populate::config::Config;
use slackwater_populate::confine::confine;
use slackwater_populate::failure::{Failure, Result};
use slackwater_populate::report::Report;
use slackwater_populate::run::Attempt;

/// The environment variable with the configuration.
const CONFIG: &str = "SLACKWATER_POPULATE";
/// Where Kubernetes reads why a container ended.
const TERMINATION_LOG: &str = "/dev/termination-log";

fn main() -> ExitCode {
    let termination_log = File::options().write(true).open(TERMINATION_LOG);
    let report = Report::new(std::io::stdout());
    let code = match populate(&report) {
        Ok(()) => 0,
        Err(failure) => {
            eprintln!("{}: {failure}", failure.reason);
            if let Ok(mut file) = termination_log {
                let words =
                    serde_json::json!({"reason": failure.reason, "message": failure.to_string()});
                drop(file.write_all(words.to_string().as_bytes()));
            }
            failure.exit_code()
        }
    };
    // The last line is always one of progress.
    report.print();
    ExitCode::from(code)
}

fn populate(report: &Report) -> Result<()> {
    let invalid = |what: String| Failure::refused("ConfigurationInvalid", what);
    let mut arguments = std::env::args_os().skip(1);
    let text = match (arguments.next(), std::env::var(CONFIG)) {
        (None, Ok(text)) => text,
        (Some(path), Err(_)) if arguments.next().is_none() => std::fs::read_to_string(&path)
            .map_err(|error| invalid(format!("read {}: {error}", path.display())))?,
        _ => {
            return Err(invalid(format!(
                "the configuration is JSON, either in the file that is the only argument, or in the environment variable {CONFIG}"
            )));
        }
    };
    let config = Config::parse(&text)?;
    // An address in most clusters. If it is a name, the controller gives the addresses.
    let api_server = std::env::var("KUBERNETES_SERVICE_HOST").ok();
    let api_server = api_server.filter(|host| host.parse::<std::net::IpAddr>().is_ok());
    let policy = config.policy(api_server.as_deref())?;
    let attempt = Attempt::prepare(&config, policy, report)?;
    confine(&attempt.folders(), config.confinement)?;
    attempt.run()
}
