//! `slackwater enrol`: a sidecar of a node's driver that keeps the node's certificate up to date.

use std::process::ExitCode;

use clap::Args;

use super::{Failure, block_on};
use crate::config::{BadConfig, Folder, NodeName, one_line};
use crate::router::{Enrolment, connect};
use crate::server;
use crate::telemetry::{self, LogFormat};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Name of this node's Node object
    #[arg(long, value_name = "NODE")]
    node_name: NodeName,
    /// Namespace of the controller
    #[arg(long, value_name = "NAMESPACE")]
    namespace: String,
    /// Directory for tls.crt, tls.key and ca.crt, which the driver reads; preferably a tmpfs
    #[arg(long, value_name = "DIR")]
    out: Folder,
    /// Log format: text or json [default: text]
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<LogFormat>,
}

/// Keeps the certificate up to date until a signal arrives.
pub(super) fn run(arguments: Arguments) -> Result<ExitCode, Failure> {
    let format = arguments.log_format.unwrap_or(LogFormat::Text);
    telemetry::init(format, None).map_err(|error| BadConfig(one_line(&error.to_string())))?;
    block_on(async {
        let signal = server::signal().map_err(Failure::run)?;
        let client = connect().await.map_err(Failure::run)?;
        let enrolment = Enrolment {
            node: arguments.node_name.0,
            namespace: arguments.namespace,
            folder: arguments.out.0,
        };
        tokio::select! {
            () = enrolment.run(&client) => {}
            () = signal => {}
        }
        Ok::<_, Failure>(ExitCode::SUCCESS)
    })
}
