//! What the LVM of this machine lists. No volume's life needs it; doctor does.

use std::path::Path;
use std::time::Duration;

use super::program::Program;
use crate::error::{HostCause, HostError};
use crate::host::{Result, VolumeGroup};

/// The image of the driver does not have it: doctor uses that of the host, where there is one.
const LVM: Program = Program {
    name: "lvm",
    package: "lvm2",
};

/// A disk that hangs must not make doctor hang.
const LVM_TIMEOUT: Duration = Duration::from_secs(30);
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
    let ended = LVM.run_within(LVM_TIMEOUT, subject, &arguments)?;
    match ended.status.success() {
        true => Ok(ended.stdout.lines().any(|line| line.trim() == uuid)),
        false => Err(HostError::unexpected("list", subject, ended.stderr)),
    }
}

/// The volume groups with this name; `None` without LVM.
pub(super) fn groups(name: &str) -> Result<Option<Vec<VolumeGroup>>> {
    let own = match run(name, &["systemid"]) {
        Ok(own) => own,
        Err(error) => match error.cause {
            HostCause::Missing { .. } => return Ok(None),
            _ => return Err(error),
        },
    };
    let select = format!("vg_name={name}");
    let format = ["vgs", "--noheadings", "--separator", SEPARATOR];
    let of_others = ["--foreign", "--shared", "--select", &select];
    let options = ["--options", "vg_uuid,vg_lock_type,vg_systemid"];
    let listed = run(name, &[&format[..], &of_others, &options].concat())?;
    Ok(Some(parse(&own, &listed)))
}

const SEPARATOR: &str = "|";

fn run(name: &str, arguments: &[&str]) -> Result<String> {
    let ended = LVM.run_within(LVM_TIMEOUT, Path::new(name), arguments)?;
    match ended.status.success() {
        true => Ok(ended.stdout),
        false => Err(HostError::unexpected("examine", name, ended.stderr)),
    }
}

/// `own` is a line `system ID: NAME`, without a name if this machine has no system ID.
fn parse(own: &str, listed: &str) -> Vec<VolumeGroup> {
    let own = own.split_once(':').map_or("", |(_, id)| id.trim());
    let groups = listed.lines().filter_map(|line| {
        let mut fields = line.trim().split(SEPARATOR).map(str::to_string);
        let uuid = fields.next().filter(|uuid| !uuid.is_empty())?;
        let lock_type = fields.next()?;
        let system_id = fields.next()?;
        Some(VolumeGroup {
            uuid,
            lock_type: if lock_type == "none" {
                String::new()
            } else {
                lock_type
            },
            is_foreign: !system_id.is_empty() && system_id != own,
            system_id,
        })
    });
    groups.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_others_and_shared_ones_are_recognized() {
        let listed = "  a-1||\n  b-2|sanlock|\n  c-3|none|here\n  d-4||there\n\n";
        let seen = |own: &str| {
            let groups = parse(own, listed).into_iter();
            let each = groups.map(|it| (it.uuid, it.lock_type, it.is_foreign));
            each.collect::<Vec<_>>()
        };
        let group = |uuid: &str, lock: &str, foreign| (uuid.into(), lock.into(), foreign);
        let mut expected = vec![
            group("a-1", "", false),
            group("b-2", "sanlock", false),
            group("c-3", "", false),
            group("d-4", "", true),
        ];
        assert_eq!(seen("  system ID: here\n"), expected);
        expected[2] = group("c-3", "", true);
        assert_eq!(seen("  system ID: \n"), expected);
    }

    #[test]
    fn fuzz_lists_of_volume_groups() {
        let listed = "  a-1||\n  b-2|sanlock|\n  c-3|none|here\n";
        crate::fuzz::fuzz_text("volume groups", &[listed], |text| {
            let groups = parse("  system ID: here\n", text);
            (!groups.is_empty()).then_some(groups)
        });
    }
}
