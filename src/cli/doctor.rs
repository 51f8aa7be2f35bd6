//! `slackwater doctor`.

use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::json;

use super::{Failure, PoolArguments, print, real_host, status};
use crate::cut::guard::GuardClient;
use crate::doctor::{self, Subject};
use crate::host::Freezer;

/// Where the driver searches for programs; it never uses `$PATH`.
const PROGRAM_FOLDERS: [&str; 4] = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"];

/// Runs all checks and prints the results. Exit code 1 if a pool, or the whole driver, cannot work.
pub(super) fn run(arguments: PoolArguments) -> Result<ExitCode, Failure> {
    // For the mount on which a freeze is tried.
    let own = [arguments.state_dir.clone()];
    let host = real_host(&own, &arguments.pools);
    // The name is short, because the path of a Unix socket in the directory must be short.
    let number = host.random_uuid().as_u128() as u32;
    let trial_dir = arguments.state_dir.join(format!("doctor-{number:08x}"));
    let examined = Subject {
        trial_dir,
        state_dir: arguments.state_dir,
        pools: arguments.pools,
        node_record: arguments.node_record,
        allowed_paths: arguments.allowed_paths,
        programs: PROGRAM_FOLDERS.map(PathBuf::from).to_vec(),
    };
    // The running guard, or one whose journal and locks are removed with the temporary directory.
    let running = GuardClient::new(host.clone(), examined.state_dir.clone()).started_by_others();
    let guard = match running.ready(false) {
        Ok(()) => running,
        Err(_) => GuardClient::new(host.clone(), examined.trial_dir.clone()),
    };
    let checks = doctor::examine(host.as_ref(), &guard, &examined);
    let has_failures = doctor::has_failures(&checks);
    if arguments.json {
        print::json(&json!({ "ok": !has_failures, "checks": checks }));
    } else {
        checks.iter().for_each(print::line);
    }
    Ok(status(!has_failures))
}
