//! The arguments of the commands that run a command of the driver in one of its pods.

use clap::{Args, ValueEnum};

use crate::cluster::Scope;

/// Where the driver's pods are.
#[derive(Clone, Debug, Args)]
pub struct Pods {
    /// Namespace of the driver [default: its pods are looked for in all]
    #[arg(long, value_name = "NAME")]
    pub driver_namespace: Option<String>,
}

impl Pods {
    /// The namespaces in which they are looked for.
    pub fn scope(&self) -> Scope {
        match &self.driver_namespace {
            Some(namespace) => Scope::Namespace(namespace.clone()),
            None => Scope::All,
        }
    }
}

/// Whether a command that changes something is run.
#[derive(Clone, Debug, Args)]
pub struct Confirmed {
    /// Run the command; without it, only what would be run is printed
    #[arg(long, short)]
    pub yes: bool,
    /// Print what would be run where, and end
    #[arg(long, conflicts_with = "yes")]
    pub dry_run: bool,
}

/// How the driver prints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Printed {
    /// Lines, as the driver prints them.
    #[default]
    Text,
    /// JSON.
    Json,
}

/// The format of the driver's output.
#[derive(Clone, Debug, Args)]
pub struct Print {
    /// Format of the output
    #[arg(
        long = "output",
        short = 'o',
        value_name = "FORMAT",
        value_enum,
        default_value_t
    )]
    pub format: Printed,
}

/// An examination of nodes.
#[derive(Clone, Debug, Args)]
pub struct DoctorArguments {
    /// The node [default: all with a pod or a pool of the driver]
    pub node: Option<String>,
    #[command(flatten)]
    pub print: Print,
    #[command(flatten)]
    pub pods: Pods,
}

/// A check of a file system.
#[derive(Clone, Debug, Args)]
pub struct CheckArguments {
    /// The claim, or the ID of the volume
    #[arg(value_name = "CLAIM|VOLUME-ID")]
    pub claim: String,
    /// Repair the errors that are found; this needs --yes
    #[arg(long)]
    pub repair: bool,
    #[command(flatten)]
    pub print: Print,
    #[command(flatten)]
    pub pods: Pods,
    #[command(flatten)]
    pub confirmed: Confirmed,
}
