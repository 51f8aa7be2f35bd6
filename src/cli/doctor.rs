//! `slackwater doctor`.

use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::json;

use super::{Failure, Settled, print, real_host};
use crate::cut::guard::GuardClient;
use crate::doctor::{self, Subject};
use crate::host::Freezer;

/// Where the driver looks for programs; never in `$PATH`.
const PROGRAM_FOLDERS: [&str; 4] = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"];

/// Looks and tells. Exit 1 if a pool, or everything, can't work.
pub(super) fn run(settled: Settled) -> Result<ExitCode, Failure> {
    // For the mount on which a freeze is tried.
    let own = [settled.state_dir.clone()];
    let host = real_host(&own, &settled.pools);
    // A unix socket lies in it, whose path is short.
    let number = host.random_uuid().as_u128() as u32;
    let trial_dir = settled.state_dir.join(format!("doctor-{number:08x}"));
    let patient = Subject {
        trial_dir,
        state_dir: settled.state_dir,
        pools: settled.pools,
        node_record: settled.node_record,
        allowed_paths: settled.allowed_paths,
        programs: PROGRAM_FOLDERS.map(PathBuf::from).to_vec(),
    };
    // The guard that runs, or one whose journal and locks go with the folder of the trial.
    let running = GuardClient::new(host.clone(), patient.state_dir.clone()).started_by_others();
    let guard = match running.ready() {
        Ok(()) => running,
        Err(_) => GuardClient::new(host.clone(), patient.trial_dir.clone()),
    };
    let checks = doctor::examine(host.as_ref(), &guard, &patient);
    let has_failures = doctor::has_failures(&checks);
    if settled.json {
        print::json(&json!({ "ok": !has_failures, "checks": checks }));
    } else {
        checks.iter().for_each(print::line);
    }
    Ok(if has_failures {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}
