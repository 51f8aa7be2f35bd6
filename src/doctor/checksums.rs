//! Checksums of btrfs below images: pools that were created by an earlier release keep them, and
//! the effect of direct I/O on them depends on the kernel.

use super::Check;
use super::pool::subject;
use crate::host::BackingFs;
use crate::model::PoolDefinition;

/// The first kernel in which direct I/O cannot leave wrong checksums.
const BUFFERS_CHECKSUMMED: (u32, u32) = (6, 15);

/// Checks whether new images in a pool's volume directory have checksums.
pub(super) fn check(
    pool: &PoolDefinition,
    images: &BackingFs,
    kernel: Option<(u32, u32)>,
) -> Option<Check> {
    if images.fs_name != "btrfs" {
        return None;
    }
    let subject = format!("{}: checksums", subject(pool));
    if images.in_place {
        let found = "new images are written in place, without btrfs checksums";
        return Some(Check::ok(subject, found));
    }
    let elsewhere = "move its volumes to a new pool, whose images are written in place";
    let buffers = kernel.is_some_and(|kernel| kernel >= BUFFERS_CHECKSUMMED);
    Some(match buffers {
        true => Check::warn(
            subject,
            "btrfs keeps checksums of the images, so the kernel uses buffered instead of direct I/O, which is slower",
            elsewhere,
        ),
        false => Check::warn(
            subject,
            "btrfs keeps checksums of the images, and before Linux 6.15 direct I/O may leave a wrong checksum: after a power loss, or in a snapshot of level crash, reading that block fails with an I/O error",
            format!("boot Linux 6.15 or newer, or {elsewhere}"),
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_with_checksums_are_reported_by_what_the_kernel_does_with_them() {
        let pool = "default=file:/srv/pool".parse().unwrap();
        let said = |fs_name: &str, in_place: bool, kernel: Option<(u32, u32)>| {
            let images = BackingFs {
                fs_name: fs_name.into(),
                mount_point: "/srv/pool".into(),
                sector: 4096,
                min_sector: 4096,
                shares_blocks: true,
                in_place,
            };
            check(&pool, &images, kernel).map(|check| check.to_string())
        };
        assert_eq!(said("xfs", true, Some((6, 1))), None);
        let marked = said("btrfs", true, Some((6, 1))).unwrap();
        assert!(marked.starts_with("ok "), "{marked}");
        for (kernel, word) in [
            (Some((6, 14)), "before Linux 6.15"),
            (None, "before Linux 6.15"),
            (Some((6, 15)), "slower"),
            (Some((7, 0)), "slower"),
        ] {
            let warned = said("btrfs", false, kernel).unwrap();
            assert!(
                warned.starts_with("warn") && warned.contains(word),
                "{warned}"
            );
        }
    }
}
