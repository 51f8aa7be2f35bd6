//! `slackwater volumes check`: checks the file system of a volume that is not in use.
//!
//! A running driver checks it while it holds the volume's lock. If no driver is running, this
//! process takes the locks of the pools, so that no driver can start during the check.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::{Failure, Place, block_on, host_with_guard, print, status};
use crate::agent::CheckVolumeResponse;
use crate::config::{BadConfig, Endpoint, Folder, Given};
use crate::cut::CutInterfaces;
use crate::cut::guard::GuardClient;
use crate::hook::NoHooks;
use crate::model::PoolDefinition;
use crate::operation::{Driver, Settings};
use crate::server::admin;

/// The arguments of the command.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// ID of the volume
    #[arg(value_name = "ID")]
    id: String,
    /// Repair the errors that are found; orphaned files are moved to lost+found
    #[arg(long)]
    repair: bool,
    /// The CSI socket of the node's driver [env: CSI_ENDPOINT]
    #[arg(long, value_name = "ENDPOINT")]
    endpoint: Option<Endpoint>,
    /// The driver's state directory [default: /run/slackwater/state]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<Folder>,
    #[command(flatten)]
    place: Place,
}

/// Exit code 1 if the file system has errors that remain.
pub(super) fn run(arguments: Arguments) -> Result<ExitCode, Failure> {
    let flags = Given {
        endpoint: arguments.endpoint,
        ..Given::default()
    };
    let flags = flags.with_env(std::env::var("CSI_ENDPOINT").ok())?;
    let given = flags.over_file(arguments.place.node.config.as_deref())?;
    let as_json = arguments.place.node.json;
    let checked = match given.endpoint {
        Some(Endpoint(socket)) => {
            let check = admin::check_volume(&socket, &arguments.id, arguments.repair);
            block_on(check)?
        }
        None => None,
    };
    let checked = match checked {
        Some(checked) => checked,
        None => without_driver(
            arguments.place,
            arguments.state_dir,
            &arguments.id,
            arguments.repair,
        )?,
    };
    if as_json {
        print::json(
            &json!({ "id": arguments.id, "sound": checked.sound, "report": checked.report }),
        );
    } else {
        print::line(&checked.report);
        let word = if checked.sound {
            "has no errors"
        } else {
            "has errors"
        };
        print::line(format!("the file system of volume {} {word}", arguments.id));
    }
    Ok(status(checked.sound))
}

/// How long the opening of a pool may take, whose records are checked after a power cut.
const OPENING_TIMEOUT: Duration = Duration::from_secs(600);

/// Opens the pools as a driver does, for this one check. No pool is created.
fn without_driver(
    place: Place,
    state_dir: Option<Folder>,
    id: &str,
    repair: bool,
) -> Result<CheckVolumeResponse, Failure> {
    let arguments = place.with(Vec::new(), state_dir)?;
    if arguments.pools.is_empty() {
        let missing = "no driver answers: give --endpoint of a running driver, or --pool (or --config) of a node whose driver is not running";
        return Err(BadConfig(missing.into()).into());
    }
    let host = host_with_guard(&[], &arguments.pools, &arguments.state_dir);
    let interfaces = CutInterfaces {
        hooks: Arc::new(NoHooks),
        freezer: Arc::new(GuardClient::new(host.clone(), arguments.state_dir.clone())),
        host,
    };
    let pools = arguments.pools.into_iter().map(|pool| PoolDefinition {
        init: false,
        ..pool
    });
    let settings = Settings {
        pools: pools.collect(),
        node_record: arguments.node_record,
        state_dir: arguments.state_dir,
        alone: true,
        ..Settings::default()
    };
    // Nothing tries again to open the pool.
    let driver = Driver::start_within(settings, interfaces, OPENING_TIMEOUT)?;
    let checked = driver.volumes.check_volume(id, repair);
    driver.leave();
    let checked = checked?;
    Ok(CheckVolumeResponse {
        sound: checked.sound,
        report: checked.report,
    })
}
