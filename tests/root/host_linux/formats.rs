//! mkfs, signatures and growth.

use std::fs;
use std::io::Write;

use slackwater::host::{Device, Effect, Host, Signature};
use slackwater::model::FsType;
use slackwater::model::size::MIB;

use super::scratch::{Scratch, error_text, run, text};

fn overwrite(device: &Device, bytes: &[u8]) {
    let mut node = fs::OpenOptions::new()
        .write(true)
        .open(&device.path)
        .unwrap();
    node.write_all(bytes).unwrap();
    node.sync_all().unwrap();
}

#[test]
fn each_file_system_is_found_again_with_its_uuid_and_size() {
    let scratch = Scratch::new();
    for fs in FsType::ALL {
        let size = 320 * MIB;
        let image = scratch.image(fs.name(), size);
        let hold = scratch.attach(&image);
        let device = hold.device();
        assert_eq!(scratch.host.signature(&device).unwrap(), Signature::None);
        for keep_blocks in [false, true] {
            let uuid = scratch.host.random_uuid();
            scratch.done(&Effect::Format {
                device: &device,
                fs,
                uuid,
                options: &[],
                keep_blocks,
            });
            let found = scratch.host.signature(&device).unwrap();
            let wanted = Signature::Fs {
                name: fs.name().into(),
                uuid: uuid.to_string(),
                size: Some(size),
                beside: None,
            };
            assert_eq!(found, wanted);
        }
    }
}

#[test]
fn a_file_system_of_the_minimum_size_is_created() {
    let scratch = Scratch::new();
    for fs in FsType::ALL {
        let image = scratch.image(fs.name(), fs.minimum_bytes());
        let hold = scratch.attach(&image);
        scratch.format(&hold.device(), fs);
    }
}

#[test]
fn extra_options_reach_mkfs() {
    let scratch = Scratch::new();
    let image = scratch.image("a", 320 * MIB);
    let hold = scratch.attach(&image);
    let device = hold.device();
    for (fs, words) in [
        (FsType::Ext4, "-L label -E stride=4 -Estripe_width=8 -m 0"),
        (FsType::Xfs, "-L label -m reflink=0 -i size=1024"),
        (FsType::Btrfs, "--label label -M"),
    ] {
        let options = slackwater::model::mkfs::split(words);
        scratch.done(&Effect::Format {
            device: &device,
            fs,
            uuid: scratch.host.random_uuid(),
            options: &options,
            keep_blocks: true,
        });
        let label = run(
            "blkid",
            &["-p", "-o", "value", "-s", "LABEL", text(&device.path)],
        );
        assert_eq!(label, "label", "{fs}");
        if fs == FsType::Ext4 {
            let dump = run("dumpe2fs", &["-h", text(&device.path)]);
            assert!(
                dump.contains("RAID stride:") && dump.contains("RAID stripe width:"),
                "{dump}"
            );
        }
    }
}

#[test]
fn the_output_of_mkfs_is_in_the_error() {
    let scratch = Scratch::new();
    let image = scratch.image("a", 16 * MIB);
    let hold = scratch.attach(&image);
    let refusal = scratch.refused(&Effect::Format {
        device: &hold.device(),
        fs: FsType::Xfs,
        uuid: scratch.host.random_uuid(),
        options: &[],
        keep_blocks: false,
    });
    assert!(
        refusal.contains("mkfs.xfs failed with exit status: 1"),
        "{refusal}"
    );
    assert!(refusal.contains("300MB"), "{refusal}");
}

#[test]
fn signatures_that_are_not_file_systems_are_distinguished() {
    let scratch = Scratch::new();
    let image = scratch.image("a", 32 * MIB);
    let hold = scratch.attach(&image);
    let device = hold.device();
    let signature = || scratch.host.signature(&device).unwrap();

    overwrite(&device, &vec![0; 4 << 20]);
    assert_eq!(signature(), Signature::None, "zeros");
    overwrite(&device, &vec![0xC3; 4 << 20]);
    assert_eq!(
        signature(),
        Signature::None,
        "garbage is not a known file system"
    );

    let mut table = vec![0; 1 << 20];
    table[446..462].copy_from_slice(&[0, 0, 2, 0, 0x83, 0, 1, 0, 8, 0, 0, 0, 16, 0, 0, 0]);
    table[510..512].copy_from_slice(&[0x55, 0xAA]);
    overwrite(&device, &table);
    assert_eq!(signature(), Signature::Other("partition table dos".into()));

    overwrite(&device, &vec![0; 1 << 20]);
    run("mkswap", &[text(&device.path)]);
    assert_eq!(signature(), Signature::Other("swap".into()));
}

#[test]
fn a_device_that_cannot_be_read_is_not_blank() {
    let scratch = Scratch::new();
    let image = scratch.image("a", 32 * MIB);
    let hold = scratch.attach(&image);
    let device = hold.device();
    // Data beyond the end of the shortened image cannot be read.
    fs::OpenOptions::new()
        .write(true)
        .open(&image.path)
        .unwrap()
        .set_len(MIB / 2)
        .unwrap();
    assert!(scratch.host.signature(&device).is_err());
}

#[test]
fn a_file_system_needs_growth_only_until_it_has_grown() {
    let scratch = Scratch::new();
    for fs in FsType::ALL {
        let volume = scratch.volume(fs.name(), fs, 320 * MIB);
        let wants = || {
            let wants = scratch.host.should_grow(&volume.device, &volume.target, fs);
            wants.unwrap_or_else(|error| panic!("{fs}: {}", error_text(&error)))
        };
        assert!(!wants(), "{fs}, just created");
        scratch.image(fs.name(), 448 * MIB);
        assert!(!wants(), "{fs}: the device has not grown yet");
        scratch.done(&Effect::ResizeLoop {
            number: volume.hold.number,
        });
        assert!(wants(), "{fs}");
        let grow = Effect::GrowFs {
            device: &volume.device,
            mount_point: &volume.target,
            fs,
        };
        if fs == FsType::Ext4 && !may_use_resources() {
            let refusal = scratch.refused(&grow);
            assert!(refusal.contains("CAP_SYS_RESOURCE"), "{refusal}");
            continue;
        }
        scratch.done(&grow);
        assert!(!wants(), "{fs}, just grown");
        let space = scratch.host.space_csi_path(&volume.target).unwrap();
        assert!(space.total > 330 * MIB, "{fs}: {space:?}");
        scratch.done(&grow);
    }
}

#[test]
fn growth_by_less_than_a_file_system_can_use_is_not_requested_for_ever() {
    let scratch = Scratch::new();
    for fs in [FsType::Xfs, FsType::Btrfs] {
        let volume = scratch.volume(fs.name(), fs, 320 * MIB);
        for more in [4096, 8192, 64 * 4096, 66 * 4096] {
            scratch.image(fs.name(), 320 * MIB + more);
            scratch.done(&Effect::ResizeLoop {
                number: volume.hold.number,
            });
            scratch.done(&Effect::GrowFs {
                device: &volume.device,
                mount_point: &volume.target,
                fs,
            });
            let wants = scratch.host.should_grow(&volume.device, &volume.target, fs);
            assert!(!wants.unwrap(), "{fs} after {more} bytes more");
        }
    }
}

#[test]
fn a_new_ext4_of_any_size_needs_no_growth() {
    let scratch = Scratch::new();
    let target = scratch.target("a/mount");
    // Sizes around the boundaries of groups of 128 MiB, where mkfs leaves a remainder unused.
    for size in [
        2 * MIB,
        128 * MIB,
        128 * MIB + 4096,
        130 * MIB,
        137 * MIB,
        258 * MIB,
        386 * MIB,
    ] {
        let image = scratch.image(&size.to_string(), size);
        let hold = scratch.attach(&image);
        let device = hold.device();
        scratch.format(&device, FsType::Ext4);
        scratch.mount(&device, &target, FsType::Ext4, &[]);
        let wants = scratch.host.should_grow(&device, &target, FsType::Ext4);
        scratch.unmount(&target);
        assert!(!wants.unwrap(), "{size}");
    }
}

#[test]
fn a_mount_of_another_device_is_neither_measured_nor_grown() {
    let scratch = Scratch::new();
    for fs in FsType::ALL {
        let volume = scratch.volume(fs.name(), fs, 320 * MIB);
        let other = scratch.image(&format!("other-{fs}"), 320 * MIB);
        let hold = scratch.attach(&other);
        let device = hold.device();
        scratch.format(&device, fs);
        assert!(
            scratch
                .host
                .should_grow(&device, &volume.target, fs)
                .is_err(),
            "{fs}"
        );
        scratch.refused(&Effect::GrowFs {
            device: &device,
            mount_point: &volume.target,
            fs,
        });
    }
}

fn may_use_resources() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() & (1 << 24) != 0
}
