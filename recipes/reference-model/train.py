"""Train one model: ``python train.py --work WORK --model reference --minutes 14 --out RUN``.

Worker processes load this file again (as ``__mp_main__``), and nothing that they do not need.
"""

if __name__ == "__main__":
    from training import main

    main()
