from torch_nvfp4.cli import main

if __name__ == "__main__":
    main()
