//! The commands about SnapshotSchedules: their list, a run besides their times, and the sets that retention
//! will delete.

pub mod list;
pub mod retention;
pub mod run;

use crate::cli::ScheduleCommand;
use crate::cluster::Cluster;
use crate::failure::Result;

/// Runs one of the commands.
pub async fn run(cluster: &Cluster, command: ScheduleCommand) -> Result<()> {
    match command {
        ScheduleCommand::Run {
            schedule,
            change,
            wait,
        } => run::run(cluster, &schedule, &change, &wait).await,
        ScheduleCommand::Retention { schedule, output } => {
            retention::run(cluster, &schedule, output.format).await
        }
    }
}
