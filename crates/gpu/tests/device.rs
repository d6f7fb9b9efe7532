//! Devices, memory, and commands.

use crate::common::{device, floats};
use sterna_gpu::kernels::Rows;
use sterna_gpu::kernels::elementwise::{add, scale};
use sterna_gpu::memory::{Pool, Upload};
use sterna_gpu::{Device, DeviceOptions, Features, GpuError, ReadRange, Recorder, Timing};

/// A device of its own, or `None` where there is no adapter.
fn open(options: DeviceOptions) -> Option<Device> {
    device()?;
    Some(Device::open(&options).unwrap())
}

#[test]
fn an_adapter_that_is_not_there_is_named() {
    let options = DeviceOptions {
        adapter: Some("no such adapter".into()),
        ..DeviceOptions::default()
    };
    let error = Device::open(&options).unwrap_err();
    assert!(matches!(error, GpuError::NoAdapter { .. }));
    assert!(error.to_string().contains("no such adapter"), "{error}");
}

#[test]
fn an_adapter_is_opened_by_its_place_and_more_than_once() {
    if device().is_none() {
        return;
    }
    let all = Device::adapters();
    for (index, info) in all.iter().enumerate() {
        let options = DeviceOptions {
            adapter_index: Some(index),
            ..DeviceOptions::default()
        };
        let [first, second] = [(); 2].map(|()| Device::open(&options).unwrap());
        assert_eq!((first.info(), second.info()), (info, info));
        // What one has, the other doesn't know of.
        let buffer = first.upload(&[1u32, 2, 3]).unwrap();
        assert_eq!(second.memory().used, 0);
        assert_eq!(first.read::<u32>(&buffer, 0..3).unwrap(), [1, 2, 3]);
    }
    let options = DeviceOptions {
        adapter_index: Some(all.len()),
        ..DeviceOptions::default()
    };
    let error = Device::open(&options).unwrap_err().to_string();
    let expected = format!("expected an adapter {}, counted from 0", all.len());
    assert!(error.contains(&expected), "{error}");
}

#[test]
fn features_are_what_was_asked_for_and_is_there() {
    let Some(all) = device() else { return };
    assert!(!Device::adapters().is_empty());
    let none = open(DeviceOptions {
        features: Features::NONE,
        ..DeviceOptions::default()
    })
    .unwrap();
    assert_eq!(none.features(), Features::NONE);
    assert_eq!(all.features().and(Features::NONE), Features::NONE);
    assert_eq!(none.limits().min_subgroup, 1);
    assert!(all.limits().binding_bytes >= 1 << 27);
}

#[test]
fn bytes_come_back_as_they_went() {
    let Some(device) = device() else { return };
    for len in [0usize, 1, 3, 4, 5, 1000] {
        let bytes: Vec<u8> = (0..len).map(|i| i as u8).collect();
        let buffer = device.upload(&bytes).unwrap();
        assert_eq!(device.read::<u8>(&buffer, 0..len).unwrap(), bytes);
        if len > 3 {
            assert_eq!(
                device.read::<u8>(&buffer, 1..len - 1).unwrap(),
                bytes[1..len - 1]
            );
        }
    }
    let buffer = device.buffer("values", 100).unwrap();
    assert_eq!(buffer.bytes(), 112);
    assert!(device.write(&buffer, 112, &[1u8]).is_err());
    assert!(device.read::<u32>(&buffer, 0..29).is_err());
    assert!(
        device
            .read::<u32>(&buffer, usize::MAX / 8..usize::MAX / 8 + 1)
            .is_err()
    );
}

#[test]
fn uploads_go_through_a_ring_of_any_size() {
    let Some(device) = device() else { return };
    // More than one thread fills a slot with, too.
    for len in [100_003u32, 5_000_001] {
        uploads(device, len);
    }
    assert!(Upload::new(device, 0, 1).is_err());
    assert!(Upload::new(device, 6, 1).is_err());
    assert!(Upload::new(device, 8, 0).is_err());
}

fn uploads(device: &Device, len: u32) {
    let bytes: Vec<u8> = (0..len).map(|i| ((i * 31) >> 3) as u8).collect();
    for (slot, n_slots) in [(4, 1), (64_000, 2), (64 << 10, 3), (5 << 20, 1)] {
        if slot == 4 && bytes.len() > 4000 {
            // A submission for each word takes its time.
            let buffer = device.buffer("bytes", 400).unwrap();
            let mut upload = Upload::new(device, slot, n_slots).unwrap();
            upload.write(&buffer, 0, &bytes[..399]).unwrap();
            assert_eq!(device.read::<u8>(&buffer, 0..399).unwrap(), bytes[..399]);
            continue;
        }
        let buffer = device.buffer("bytes", bytes.len() as u64 + 8).unwrap();
        let mut upload = Upload::new(device, slot, n_slots).unwrap();
        upload.write(&buffer, 8, &bytes).unwrap();
        assert_eq!(
            device.read::<u8>(&buffer, 8..8 + bytes.len()).unwrap(),
            bytes
        );
        assert!(upload.write(&buffer, 64, &bytes).is_err());
        upload.write(&buffer, 0, &[5; 8]).unwrap();
        assert_eq!(device.read::<u8>(&buffer, 0..8).unwrap(), [5; 8]);
    }
}

#[test]
fn a_budget_is_kept() {
    let options = DeviceOptions {
        memory_budget: Some(10_000),
        ..DeviceOptions::default()
    };
    let Some(device) = open(options) else { return };
    let first = device.buffer("first", 6000).unwrap();
    let error = device.buffer("second", 6000).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("second") && text.contains("6000") && text.contains("10000"),
        "{text}"
    );
    drop(first);
    let second = device.buffer("second", 6000).unwrap();
    let clone = second.clone();
    drop(second);
    assert_eq!(device.memory().used, 6000);
    drop(clone);
    assert_eq!((device.memory().used, device.memory().peak), (0, 6000));
    let limit = device.limits().buffer_bytes;
    assert!(device.buffer("huge", limit + 16).is_err());
    assert!(device.buffer("huge", u64::MAX).is_err());
}

#[test]
fn a_pool_gives_buffers_again() {
    let Some(device) = open(DeviceOptions::default()) else {
        return;
    };
    let mut pool = Pool::new(&device);
    let first = pool.take(5000).unwrap();
    let kept = first.clone();
    pool.give(first);
    assert_eq!(pool.take(4990).unwrap(), kept);
    assert_ne!(pool.take(4990).unwrap(), kept);
    pool.give(kept.clone());
    // Too large for the limit.
    assert_ne!(pool.take(100).unwrap(), kept);
    pool.clear();
    drop(kept);
    let used = device.memory().used;
    for round in 0..50 {
        let buffers: Vec<_> = (1..20)
            .map(|i| pool.take(i * 777 + round % 3).unwrap())
            .collect();
        buffers.into_iter().for_each(|buffer| pool.give(buffer));
    }
    assert!(
        device.memory().used - used < 400_000,
        "{}",
        device.memory().used - used
    );
}

#[test]
fn commands_are_replayed_in_order() {
    for features in [Features::ALL, Features::NONE] {
        let Some(device) = open(DeviceOptions {
            features,
            ..DeviceOptions::default()
        }) else {
            return;
        };
        let (x, y) = (
            device.upload(&[1.0f32; 8]).unwrap(),
            device.upload(&[2.0f32; 8]).unwrap(),
        );
        let mut recorder = Recorder::new(&device);
        assert!(recorder.is_empty());
        add(&mut recorder, Rows::new(&x, 1, 8), Rows::new(&y, 1, 8)).unwrap();
        scale(&mut recorder, Rows::new(&x, 1, 4), 2.0).unwrap();
        assert_eq!(recorder.len(), 2);
        let twice = recorder.finish().unwrap();
        let nothing = Recorder::new(&device).finish().unwrap();
        let reads = [
            ReadRange::of::<f32>(&x, 3..5),
            ReadRange::of::<f32>(&y, 0..0),
        ];
        let used = device.memory().used;
        let mut submission = device.submit(&[&twice, &nothing, &twice], &reads).unwrap();
        while !submission.is_done().unwrap() {
            std::thread::yield_now();
        }
        let read = submission.wait().unwrap();
        assert_eq!(
            bytemuck::pod_collect_to_vec::<u8, f32>(&read[0]),
            [16.0, 5.0]
        );
        assert!(read[1].is_empty());
        // Submissions that no one waits for do no harm.
        for _ in 0..20 {
            drop(device.submit(&[&twice], &reads).unwrap());
        }
        assert_eq!(device.read::<f32>(&y, 0..1).unwrap(), [2.0]);
        assert_eq!(device.memory().used, used);
    }
}

#[test]
fn dispatches_are_timed() {
    let Some(device) = device() else { return };
    let (x, y) = (
        device.upload(&floats(4096, 1)).unwrap(),
        device.upload(&floats(4096, 2)).unwrap(),
    );
    let mut recorder = Recorder::new(device);
    for _ in 0..3 {
        add(
            &mut recorder,
            Rows::new(&x, 1, 4096),
            Rows::new(&y, 1, 4096),
        )
        .unwrap();
    }
    let commands = recorder.finish().unwrap();
    match device.time(&[&commands, &commands]) {
        Ok(times) => {
            assert_eq!(times.len(), 6);
            assert!(times.iter().all(|t| t.name == "ELEMENTWISE" && t.us < 1e7));
        }
        Err(error) => assert!(!device.features().timestamps, "{error}"),
    }
    // More than one set of timestamps holds.
    let (x, y) = (
        device.upload(&[0.0f32; 4]).unwrap(),
        device.upload(&[1.0f32; 4]).unwrap(),
    );
    let mut recorder = Recorder::new(device);
    for _ in 0..4100 {
        add(&mut recorder, Rows::new(&x, 1, 4), Rows::new(&y, 1, 4)).unwrap();
    }
    let many = recorder.finish().unwrap();
    if device.features().timestamps {
        let times = device.time(&[&many, &commands]).unwrap();
        assert_eq!(times.len(), 4103);
        assert!(times.iter().all(|t| t.us < 1e7));
        assert_eq!(device.read::<f32>(&x, 0..4).unwrap(), [4100.0; 4]);
        let grids = |times: &[Timing]| times.iter().map(|t| t.grid).collect::<Vec<_>>();
        assert_eq!(grids(&times[..4100]), [[1, 1]; 4100]);
        assert!(grids(&times[4100..]).iter().all(|grid| grid[0] > 1));
        assert_eq!(device.time(&[]).unwrap(), []);
    }
    let Some(without) = open(DeviceOptions {
        features: Features::NONE,
        ..DeviceOptions::default()
    }) else {
        return;
    };
    assert!(matches!(
        without.time(&[]),
        Err(GpuError::Unsupported { .. })
    ));
}

#[test]
fn pipelines_are_made_once_and_kept_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let options = DeviceOptions {
        pipeline_cache: Some(folder.path().join("pipelines")),
        ..DeviceOptions::default()
    };
    let use_it = |device: &Device| {
        let x = device.upload(&[1.0f32]).unwrap();
        let mut recorder = Recorder::new(device);
        for _ in 0..3 {
            scale(&mut recorder, Rows::new(&x, 1, 1), 2.0).unwrap();
        }
        assert_eq!(device.n_pipelines(), 1);
        let commands = recorder.finish().unwrap();
        device.submit(&[&commands], &[]).unwrap().wait().unwrap();
        assert_eq!(device.read::<f32>(&x, 0..1).unwrap(), [8.0]);
    };
    let Some(first) = open(options.clone()) else {
        return;
    };
    use_it(&first);
    if !first.features().pipeline_cache {
        return;
    }
    assert!(first.save_pipelines().unwrap());
    assert!(!first.save_pipelines().unwrap());
    let file = std::fs::read_dir(folder.path().join("pipelines"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    use_it(&open(options.clone()).unwrap());
    // Nothing new, nothing written: neither by a second device with the same kernels, nor as it is dropped.
    let second = open(options.clone()).unwrap();
    use_it(&second);
    assert!(!second.save_pipelines().unwrap());
    let before = std::fs::metadata(&file).unwrap().modified().unwrap();
    drop(second);
    assert_eq!(
        std::fs::metadata(&file).unwrap().modified().unwrap(),
        before
    );
    // A truncated or changed file is ignored.
    let whole = std::fs::read(&file).unwrap();
    for damaged in [&whole[..whole.len() - 1], &whole[..5], &[], &[7; 100]] {
        std::fs::write(&file, damaged).unwrap();
        let device = open(options.clone()).unwrap();
        use_it(&device);
        assert!(device.save_pipelines().unwrap());
    }
}

#[test]
fn pipelines_are_kept_when_devices_go() {
    let folder = tempfile::tempdir().unwrap();
    let options = DeviceOptions {
        pipeline_cache: Some(folder.path().join("pipelines")),
        ..DeviceOptions::default()
    };
    let files = || -> Vec<_> {
        let entries = std::fs::read_dir(folder.path().join("pipelines"));
        entries.map_or(Vec::new(), |all| {
            all.map(|e| e.unwrap().file_name()).collect()
        })
    };
    let use_it = |device: &Device, n: usize| {
        let x = device.upload(&vec![1.0f32; n]).unwrap();
        let mut recorder = Recorder::new(device);
        scale(&mut recorder, Rows::new(&x, 1, n), 2.0).unwrap();
        let commands = recorder.finish().unwrap();
        device.submit(&[&commands], &[]).unwrap().wait().unwrap();
        assert_eq!(device.read::<f32>(&x, 0..1).unwrap(), [2.0]);
    };
    let Some(device) = open(options.clone()) else {
        return;
    };
    let has_cache = device.features().pipeline_cache;
    // Unused, or lost: nothing is kept.
    drop(device);
    assert!(files().is_empty());
    let device = open(options.clone()).unwrap();
    use_it(&device, 1);
    device.lose();
    drop(device);
    assert!(files().is_empty());
    // Several at once, each of which leaves a complete file.
    std::thread::scope(|scope| {
        for n in 1..5 {
            let options = options.clone();
            scope.spawn(move || use_it(&Device::open(&options).unwrap(), n));
        }
    });
    assert_eq!(files().len(), usize::from(has_cache), "{:?}", files());
    let device = open(options).unwrap();
    use_it(&device, 3);
    assert!(!device.save_pipelines().unwrap());
    // A folder that can't be made is no reason to fail.
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let device = open(DeviceOptions {
        pipeline_cache: Some(file.join("pipelines")),
        ..DeviceOptions::default()
    })
    .unwrap();
    use_it(&device, 2);
    assert_eq!(device.save_pipelines().is_err(), has_cache);
}

#[test]
fn offers_are_what_devices_agree_on() {
    let Some(device) = device() else { return };
    let offers = Device::all_caps(&DeviceOptions::default());
    let offer = offers.iter().find(|o| o.info == *device.info()).unwrap();
    assert_eq!(offer.features, device.features());
    assert_eq!(offer.limits, *device.limits());
    let plain = Device::all_caps(&DeviceOptions {
        features: Features::NONE,
        ..DeviceOptions::default()
    });
    let variants = plain[0].variants().map(|(_, variant)| variant);
    assert_eq!(
        variants,
        [
            "shared memory",
            "byte by byte",
            "tiles of packed bytes",
            "uniform buffer",
            "compiled at every start"
        ]
    );
}

#[test]
fn a_lost_device_says_so_and_another_goes_on() {
    let Some(device) = open(DeviceOptions::default()) else {
        return;
    };
    let x = device.upload(&[1.0f32; 4]).unwrap();
    let mut recorder = Recorder::new(&device);
    scale(&mut recorder, Rows::new(&x, 1, 4), 2.0).unwrap();
    let commands = recorder.finish().unwrap();
    let mut recorder = Recorder::new(&device);
    let on_its_way = device
        .submit(&[&commands], &[ReadRange::of::<f32>(&x, 0..4)])
        .unwrap();
    device.lose();
    assert!(device.is_lost());
    let is_lost =
        |result: Result<(), GpuError>| assert!(matches!(result, Err(GpuError::Lost { .. })));
    is_lost(on_its_way.wait().map(|_| ()));
    is_lost(device.submit(&[&commands], &[]).map(|_| ()));
    is_lost(device.buffer("more", 16).map(|_| ()));
    is_lost(device.write(&x, 0, &[0u8; 4]));
    is_lost(device.read::<f32>(&x, 0..1).map(|_| ()));
    is_lost(scale(&mut recorder, Rows::new(&x, 1, 4), 2.0));
    drop((x, commands, recorder));
    let next = Device::open(&DeviceOptions::default()).unwrap();
    assert!(!next.is_lost());
    let x = next.upload(&[3.0f32]).unwrap();
    assert_eq!(next.read::<f32>(&x, 0..1).unwrap(), [3.0]);
}

/// Between a future's being polled and the device's being waited for.
#[test]
fn what_is_lost_while_it_is_waited_for_says_so_itself() {
    let Some(device) = open(DeviceOptions::default()) else {
        return;
    };
    let buffer = device.upload(&[1.0f32]).unwrap();
    let read = ReadRange::of::<f32>(&buffer, 0..1);
    let mut submission = std::pin::pin!(device.submit(&[], &[read]).unwrap());
    let waited = device.block_on(std::future::poll_fn(|cx| {
        let polled = submission.as_mut().poll(cx);
        if polled.is_pending() {
            device.lose();
        }
        polled
    }));
    assert!(
        matches!(waited, Ok(Err(GpuError::Lost { .. }))),
        "{waited:?}"
    );
}

#[test]
fn a_submission_is_a_future() {
    use std::pin::Pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Context, Poll, Wake, Waker};

    struct Flag(AtomicBool);
    impl Wake for Flag {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Release);
        }
    }

    // A device of its own, which nothing else polls.
    let Some(device) = open(DeviceOptions::default()) else {
        return;
    };
    let buffer = device.upload(&[1.0f32, 2.0]).unwrap();
    let submit = || {
        let read = ReadRange::of::<f32>(&buffer, 0..2);
        device.submit(&[], &[read]).unwrap()
    };
    let flag = Arc::new(Flag(AtomicBool::new(false)));
    let waker = Waker::from(flag.clone());
    let mut first = submit();
    let poll = Pin::new(&mut first).poll(&mut Context::from_waker(&waker));
    assert!(poll.is_pending());
    assert!(!flag.0.load(Ordering::Acquire));
    // Waiting for a later one polls the device, and wakes whoever waits for this one.
    submit().wait().unwrap();
    assert!(flag.0.load(Ordering::Acquire));
    let poll = Pin::new(&mut first).poll(&mut Context::from_waker(&waker));
    let Poll::Ready(Ok(bytes)) = poll else {
        panic!("{poll:?}");
    };
    assert_eq!(
        bytes,
        [[1.0f32.to_ne_bytes(), 2.0f32.to_ne_bytes()].concat()]
    );
    // Nothing to read can be waited for too.
    device
        .block_on(device.submit(&[], &[]).unwrap())
        .unwrap()
        .unwrap();
    let foreign = device.block_on(std::future::pending::<()>());
    assert!(matches!(foreign, Err(GpuError::Unsupported { .. })));
}
