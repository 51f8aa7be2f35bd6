//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::cluster::{Cluster, Scope};

/// The whole command line.
#[derive(Debug, Parser)]
#[command(
    name = "kubectl-slackwater",
    bin_name = "kubectl slackwater",
    version,
    about = "Pools, volumes and snapshots of Slackwater in a cluster",
    disable_help_subcommand = true
)]
pub struct Cli {
    /// Which cluster, and as whom.
    #[command(flatten)]
    pub connection: Connection,
    /// What is to be done.
    #[command(subcommand)]
    pub command: Command,
}

/// Which cluster, and as whom.
#[derive(Debug, Args)]
pub struct Connection {
    /// Context of the kubeconfig
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,
    /// Kubeconfig file [default: KUBECONFIG, or ~/.kube/config]
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// User to impersonate
    #[arg(long = "as", global = true, value_name = "USER")]
    pub as_user: Option<String>,
    /// Group to impersonate (may be repeated)
    #[arg(long, global = true, value_name = "GROUP", requires = "as_user")]
    pub as_group: Vec<String>,
    /// Namespace [default: that of the context]
    #[arg(long, short, global = true, value_name = "NAME")]
    pub namespace: Option<String>,
    /// Name of the driver (`driverName` of the chart)
    #[arg(
        long,
        global = true,
        value_name = "NAME",
        default_value = "csi.slackwater.dev"
    )]
    pub driver_name: String,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List pools, the fullest first
    Pools(ListArguments),
    /// List volumes with their claims, nodes and pools
    Volumes(ListArguments),
    /// List snapshots with the consistency level that they have reached
    Snapshots(ListArguments),
    /// Show where the volume of a claim is, and which pods use it
    Who {
        /// The claim
        claim: String,
        #[command(flatten)]
        output: Output,
    },
    /// Show pools, last cuts, moves and problems on one screen
    Status(ListArguments),
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
    #[arg(
        long = "output",
        short = 'o',
        value_name = "FORMAT",
        value_enum,
        default_value_t
    )]
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
    use std::collections::BTreeSet;

    use clap::CommandFactory;

    use super::*;

    /// The long options of a command and of those below it.
    fn options(command: &clap::Command) -> BTreeSet<String> {
        let own = command
            .get_arguments()
            .filter_map(|argument| argument.get_long());
        let own = own.map(|name| format!("--{name}"));
        let below = command.get_subcommands().flat_map(options);
        own.chain(below).collect()
    }

    /// Names of commands, also of those below them.
    fn commands(command: &clap::Command) -> Vec<String> {
        let each = command
            .get_subcommands()
            .flat_map(|one| match one.has_subcommands() {
                true => {
                    let below = commands(one).into_iter();
                    below
                        .map(|name| format!("{} {name}", one.get_name()))
                        .collect()
                }
                false => vec![one.get_name().to_string()],
            });
        each.collect()
    }

    #[test]
    fn the_page_has_all_options_and_commands_and_no_others() {
        Cli::command().debug_assert();
        let page = include_str!("../../docs/plugin.md");
        let code = page.split('`').skip(1).step_by(2);
        let words = code.flat_map(|code| code.split([' ', '=']));
        let named: BTreeSet<_> = words
            .filter(|word| word.starts_with("--"))
            .map(str::to_string)
            .collect();
        assert_eq!(named, options(&Cli::command()));
        for command in commands(&Cli::command()) {
            let row = |end: &str| page.contains(&format!("\n| `{command}{end}"));
            assert!(
                row("`") || row(" "),
                "docs/plugin.md has no row of {command}"
            );
        }
    }
}
