//! What the LVM of this machine lists. No volume's life needs it; doctor does.

use std::path::Path;
use std::time::Duration;

use super::program::Program;
use crate::error::HostError;
use crate::host::Result;

/// The image of the driver does not have it: doctor uses that of the host, where there is one.
const LVM: Program = Program {
    name: "lvm",
    package: "lvm2",
};

/// A disk that hangs must not make doctor hang.
const LIMIT: Duration = Duration::from_secs(30);
/// Accepts every device, whatever lvm.conf and the devices file say.
const EVERYTHING: &str =
    r#"devices { filter=["a|.*|"] global_filter=["a|.*|"] use_devicesfile=0 }"#;

/// Whether LVM lists a physical volume with this UUID.
pub(super) fn lists(uuid: &str, ignore_nothing: bool) -> Result<bool> {
    let subject = Path::new(uuid);
    let mut arguments = vec!["pvs", "--noheadings", "--options", "pv_uuid"];
    if ignore_nothing {
        arguments.extend(["--config", EVERYTHING]);
    }
    let ended = LVM.run_within(LIMIT, subject, &arguments)?;
    match ended.status.success() {
        true => Ok(ended.stdout.lines().any(|line| line.trim() == uuid)),
        false => Err(HostError::unexpected("list", subject, ended.stderr)),
    }
}
